# pyright: reportUnknownVariableType=false
"""Our section `turnwise` of verl's config: holds a whole Config and a pickled payload."""

import base64
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.envs.base import EnvFactory
from turnwise.integrations.verl.config.carried import CarriedEnv, by_value
from turnwise.rollout.agents import Agent

SECTION = "turnwise"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Python objects that the workers need and a config cannot hold: classes of environments and
    agents."""

    factories: Mapping[str, EnvFactory] = field(default_factory=dict)
    """Environment factories by tag."""
    agent_cls: type[Agent] | None = None

    def __bool__(self) -> bool:
        return bool(self.factories) or self.agent_cls is not None


def pack(payload: Payload) -> str:
    """The payload as text, "" where it is empty. Classes of the main script and of a user's own
    files travel by value.

    Example:
        >>> pack(Payload())
        ''
    """
    if not payload:
        return ""
    from ray.cloudpickle.cloudpickle import dumps

    given: list[Any] = [] if payload.agent_cls is None else [payload.agent_cls]
    for factory in payload.factories.values():
        given.append(factory.source if isinstance(factory, CarriedEnv) else factory)
    with by_value(given):
        return base64.b64encode(dumps(payload)).decode()


def unpack(text: str | None) -> Payload:
    """The payload that `pack` wrote. It comes from the driver of this run, over Ray, which pickles
    everything else."""
    if not text:
        return Payload()
    from ray import cloudpickle

    return cloudpickle.loads(base64.b64decode(text))


@contextmanager
def open_section(verl_config: Any) -> Generator[Any]:
    """Our section of verl's config, made where it is missing, to write into."""
    from omegaconf import open_dict

    with open_dict(verl_config):
        if verl_config.get(SECTION) is None:
            verl_config[SECTION] = {}
        yield verl_config[SECTION]


def write_section(verl_config: Any, config: Config, payload: Payload) -> None:
    """Puts config and payload into verl's config, so that every worker finds them."""
    with open_section(verl_config) as section:
        section.json, section.payload = config.model_dump_json(), pack(payload)


def read_config(verl_config: Any) -> Config:
    """Our Config in verl's: as a driver wrote it (turnwise.json), or as turnwise.config names it.

    Raises:
        ValueError: verl's config has no section of ours.
    """
    section = verl_config.get(SECTION)
    if section is None:
        raise ValueError(
            "verl's config has no section turnwise; add +turnwise.config=FILE_OR_RECIPE, or start "
            "from "
            "`python -m turnwise.integrations.verl.overrides FILE_OR_RECIPE`"
        )
    if section.get("json"):
        return Config.model_validate(json.loads(section["json"]))
    source = section.get("config")
    if source is None:
        raise ValueError(
            "section turnwise needs the key config: a file, a recipe's name, or settings"
        )
    if not isinstance(source, str):
        from omegaconf import OmegaConf

        source = OmegaConf.to_container(source, resolve=True)
    return load_config(cast(Any, source), ["backend=verl"])
