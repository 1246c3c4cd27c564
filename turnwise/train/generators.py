"""The generator that a run samples with: turnwise's own, or the user's, checked before the first
step."""

from collections.abc import Callable
from typing import Any, Protocol

from turnwise.config.schema import Config
from turnwise.generate.base import Generator
from turnwise.generate.check import check_generator
from turnwise.generate.hf import HFGenerator
from turnwise.models.policy import Policy
from turnwise.train.networks import sampling_model
from turnwise.user_code import find_part, wanted_arguments


class TrainedGenerator(Generator, Protocol):
    """A generator whose weights are being trained."""

    def weights_updated(self, version: int) -> None:
        """The model's weights changed: what is cached of them is stale, and completions from now on
        carry this version."""
        ...

    def free_cache(self) -> None:
        """Gives memory back for an update."""
        ...


def find_generator(name: str) -> Callable[..., Any]:
    """The user's function or class that makes a generator.

    Raises:
        ValueError: there is none, or it is something else.
    """
    found = find_part("generator", name)
    if not callable(found):
        raise ValueError(
            f"rollout.generator {name!r} must be a function or class that makes a generator from "
            "model, tokenizer, config"
        )
    return found


def make_generator(config: Config, policy: Policy, *, version: int) -> TrainedGenerator:
    """The generator of a run.

    Raises:
        ValueError: the user's own generator failed a check.
    """
    model, tokenizer = sampling_model(policy), policy.tokenizer
    name = config.rollout.generator
    if name is None:
        return HFGenerator(
            model,
            tokenizer,
            slots=config.rollout.slots,
            max_context=config.rollout.max_context,
            deterministic=config.train.deterministic,
            policy_version=version,
            compile=config.train.compile,
        )
    make = find_generator(name)
    known = {"model": model, "tokenizer": tokenizer, "config": config.rollout}
    made: Any = make(**{key: known[key] for key in wanted_arguments(make, known)})
    if not callable(getattr(made, "weights_updated", None)):
        raise ValueError(
            f"rollout.generator {name!r}: a generator in training has weights_updated(version), "
            "which is called after every update"
        )
    check_generator(made, tokenizer, name=name)
    made.weights_updated(version)
    return made
