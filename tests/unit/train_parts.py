"""Batches and policies for the tests of training: real models, written out by hand."""

import torch

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import AlgoConfig, TrainConfig
from turnwise.data.batch import Batch, collate
from turnwise.models.policy import Policy, Precision, make_critic, prepare
from turnwise.testing.tiny import ModelKind, tiny_model, tiny_tokenizer
from turnwise.train.update import Learner
from turnwise.types import Sample

CPU = Precision.choose("auto", device="cpu")


def sample(
    ids: list[int], mask: str, *, episode: str, group: int, reward: float, truncated: bool = False
) -> Sample:
    """A sample from a ruler: one character per token, "." for a prompt, a digit for the turn that
    said it."""
    assert len(ids) == len(mask)
    said = [char != "." for char in mask]
    turns = [int(char) if char != "." else -1 for char in mask]
    last = max(index for index, one in enumerate(said) if one)
    return Sample(
        ids=tuple(ids),
        response_mask=tuple(said),
        loss_mask=tuple(said),
        logprobs=tuple(-1.0 - 0.01 * index if one else 0.0 for index, one in enumerate(said)),
        turn_ids=tuple(turns),
        rewards=tuple(reward if index == last else 0.0 for index in range(len(ids))),
        state_keys={turn: f"state-{turn}" for turn in sorted(set(turns) - {-1})},
        episode_id=episode,
        group_id=group,
        truncated=truncated,
    )


def samples() -> list[Sample]:
    """Five rows of different lengths in two groups; one is truncated."""
    return [
        sample([1, 2, 7, 8, 3, 9], "..00.1", episode="a", group=0, reward=1.0),
        sample([1, 2, 6, 4], "..00", episode="b", group=0, reward=0.0),
        sample(
            [1, 2, 5, 3, 9, 9, 2, 7], "..0..111", episode="c", group=0, reward=0.5, truncated=True
        ),
        sample([4, 7, 8], ".00", episode="d", group=1, reward=0.0),
        sample([4, 6, 1, 2, 5, 5, 8, 3, 1], ".00..1122"[:9], episode="e", group=1, reward=2.0),
    ]


def batch() -> Batch:
    return collate(samples(), pad_id=0)


def policy(
    kind: ModelKind = "llama", *, critic: str | None = "separate", temperature: float = 1.0
) -> Policy:
    model = prepare(tiny_model(kind))
    head = None if critic is None else make_critic(model, shared=critic == "shared")
    if head is not None:
        with torch.no_grad():
            head.head.out.weight.copy_(
                torch.linspace(-0.3, 0.3, head.head.out.weight.numel())[None]
            )
    return Policy(model, tiny_tokenizer(), precision=CPU, critic=head, temperature=temperature)


def algorithm(name: str = "bi_level_gae", **settings: object) -> Algorithm:
    return build_algorithm(AlgoConfig.model_validate({"name": name, **settings}))


def learner(policy: Policy, algorithm: Algorithm, **settings: object) -> Learner:
    return Learner(
        policy, algorithm, TrainConfig.model_validate({"max_gap": 100.0, **settings}), seed=0
    )
