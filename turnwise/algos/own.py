# pyright: reportUnknownMemberType=false
"""A user's own advantage estimator or policy loss: a function that names what it wants to be given.

    def estimator(rewards, mask, group_ids): ... -> advantages, or (advantages, returns)
    def loss(ratio, advantages): ...             -> the loss of every token

Both are checked before a run starts: an estimator that reads padding and a loss that mixes rows
would train wrongly without a word.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.critics import bootstrap_of, values_of
from turnwise.algos.layout import Layout, build_layout
from turnwise.data.batch import Batch
from turnwise.user_code import find_part, wanted_arguments

Own = Callable[..., Any]
SETTINGS = ("gamma", "lam", "high_level_gamma", "high_level_lam")
ESTIMATOR_ARGUMENTS = (
    *("rewards", "mask", "values", "turn_ids", "state_ids"),  # [E, L]
    *("group_ids", "bootstrap", "truncated"),  # [E]
    *SETTINGS,
)
"""Arguments that an estimator may take. A row is an episode, and position t its t-th sampled token;
`mask` is False where a shorter episode is padded."""
LOSS_ARGUMENTS = (
    *("logprobs", "old_logprobs", "ratio", "advantages", "mask"),  # [B, T]
    *("clip_low", "clip_high"),
)
"""Arguments that a loss may take. `logprobs` and `ratio` carry the gradient."""


def own_algorithm(name: str) -> Algorithm:
    """The algorithm that a user's part is: an Algorithm as it stands, or an estimator in one.

    Raises:
        ValueError: the part is neither, or an estimator that failed a check.
    """
    part = find_part("algorithm", name)
    if isinstance(part, Algorithm):
        return part
    if not callable(part):
        raise ValueError(
            f"algo.name={name!r} must be an estimator (a function) or an Algorithm, got "
            f"{type(part).__name__}"
        )
    wanted = wanted_arguments(part, dict.fromkeys(ESTIMATOR_ARGUMENTS))
    algorithm = Algorithm(
        name=name.rpartition(":")[2],
        advantage=name,
        estimator=_Estimator(part, wanted, name),
        settings=wanted & frozenset(SETTINGS),
        needs_critic=bool(wanted & {"values", "bootstrap"}),
        compares_groups="group_ids" in wanted,
        uses_token_rewards=True,
    )
    check_estimator(part, wanted, name)
    return algorithm


class _Estimator:
    """A user's estimator as `Algorithm.estimator`: gathers each episode's tokens into a row, and
    puts the numbers back."""

    def __init__(self, function: Own, wanted: frozenset[str], name: str) -> None:
        self._function, self._wanted, self._name = function, wanted, name

    def __call__(self, batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
        layout = build_layout(
            batch.response_mask, turn_ids=batch.turn_ids, episode_ids=batch.episode_ids
        )
        grid = _Grid(layout)
        last = layout.last_rows
        known: dict[str, Any] = {
            "rewards": grid.spread(rewards, 0.0),
            "mask": grid.mask,
            "turn_ids": grid.spread(batch.turn_ids, -1),
            "state_ids": grid.spread(batch.state_ids, -1),
            "group_ids": batch.group_ids[last],
            "truncated": batch.truncated[last],
            **{name: getattr(algorithm, name) for name in SETTINGS},
        }
        if algorithm.needs_critic:
            known["values"] = grid.spread(values_of(batch), 0.0)
            after = bootstrap_of(batch)
            known["bootstrap"] = torch.zeros_like(last).double() if after is None else after[last]
        advantages, returns = call_estimator(self._function, self._wanted, known, self._name)
        tokens = [layout.put(x.double()[grid.mask], rewards) for x in (advantages, returns)]
        return tokens[0], tokens[1], {}


class _Grid:
    """The N tokens of a layout as [E, L]: a row per episode."""

    def __init__(self, layout: Layout) -> None:
        lengths = layout.episode_lengths
        places = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=lengths.device)
        self.mask = places < lengths[:, None]
        self._index = layout.index

    def spread(self, tensor: Tensor, empty: float) -> Tensor:
        tokens = tensor.reshape(-1).index_select(0, self._index)
        tokens = tokens.double() if tokens.is_floating_point() else tokens
        full = torch.full(self.mask.shape, empty, dtype=tokens.dtype, device=tokens.device)
        full[self.mask] = tokens
        return full


def call_estimator(
    function: Own, wanted: frozenset[str], known: Mapping[str, Any], name: str
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), 0 outside the mask. Without returns of its own, an estimator's are
    its advantages, plus the values where it reads them.

    Raises:
        ValueError: what the estimator returned has another shape, or is not finite.
    """
    mask = cast(Tensor, known["mask"])
    found = function(**{key: known[key] for key in wanted})
    pair = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)
    if not 1 <= len(pair) <= 2 or not all(isinstance(x, Tensor) for x in pair):
        raise ValueError(
            f"estimator {name!r} must return advantages, or (advantages, returns), as tensors"
        )
    for what, tensor in zip(("advantages", "returns"), pair, strict=False):
        if tensor.shape != mask.shape or not tensor.is_floating_point():
            raise ValueError(
                f"estimator {name!r} must return floats of shape {tuple(mask.shape)} as {what}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if not bool(tensor[mask].isfinite().all()):
            raise ValueError(f"estimator {name!r} returned {what} that are not finite")
    advantages = torch.where(mask, pair[0].detach(), 0.0)
    if len(pair) == 2:
        return advantages, torch.where(mask, pair[1].detach(), 0.0)
    values = known.get("values")
    return advantages, advantages if values is None else torch.where(mask, advantages + values, 0.0)


def check_estimator(function: Own, wanted: frozenset[str], name: str) -> None:
    """Raises ValueError where an estimator breaks a rule on six small episodes: shape, finite
    numbers, inputs left alone, padding unread, and the same numbers in any order of the rows."""
    known = _six_episodes()
    before = {key: value.clone() for key, value in known.items() if isinstance(value, Tensor)}
    mask = cast(Tensor, known["mask"])
    advantages, _ = call_estimator(function, wanted, known, name)
    for key, value in before.items():
        if not torch.equal(value, known[key]):
            raise ValueError(f"estimator {name!r} wrote into its {key}; work on a copy")
    dirty = {
        key: torch.where(mask, value, 1e3) if key in ("rewards", "values") else value
        for key, value in known.items()
    }
    _same(
        call_estimator(function, wanted, dirty, name)[0],
        advantages,
        f"estimator {name!r} reads padding: what stands outside `mask` changes its advantages; "
        "use torch.where(mask, x, 0)",
    )
    order = torch.tensor([2, 5, 0, 3, 1, 4])
    turned = {
        key: value[order] if isinstance(value, Tensor) else value for key, value in known.items()
    }
    _same(
        call_estimator(function, wanted, turned, name)[0],
        advantages[order],
        f"estimator {name!r} depends on the order of the episodes; compare by group_ids",
    )


def own_loss(name: str) -> Own:
    """The user's loss of a token, checked.

    Raises:
        ValueError: it is no function, or failed a check.
    """
    part = find_part("loss", name)
    if not callable(part):
        raise ValueError(f"algo.surrogate={name!r} must be a function, got {type(part).__name__}")
    check_loss(part, name)
    return part


def call_loss(function: Own, known: Mapping[str, Any]) -> Tensor:
    """The loss of every token, [B, T], 0 outside the mask.

    Raises:
        ValueError: the function returned something else.
    """
    wanted = wanted_arguments(function, known)
    mask = cast(Tensor, known["mask"])
    found = function(**{key: known[key] for key in wanted})
    if not isinstance(found, Tensor) or found.shape != mask.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"a policy loss returns the loss of every token, shape {tuple(mask.shape)}, got "
            f"{shape}; the mean over tokens is algo.reduction's"
        )
    return torch.where(mask, found, 0.0)


def check_loss(function: Own, name: str) -> None:
    """Raises ValueError where a loss breaks a rule on a small batch: shape, finite numbers, a
    gradient for every token with an advantage and for no masked one, and no mixing of rows."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    old = -torch.rand(mask.shape, generator=generator) - 0.5
    steps = (torch.rand(mask.shape, generator=generator) - 0.5) * 0.02
    advantages = torch.where(mask, torch.randn(mask.shape, generator=generator), 0.0)
    new = (old + steps).requires_grad_()

    def known(rows: slice) -> dict[str, Any]:
        return {
            "logprobs": new[rows],
            "old_logprobs": old[rows],
            "ratio": (new[rows] - old[rows]).exp(),
            "advantages": advantages[rows],
            "mask": mask[rows],
            "clip_low": 0.2,
            "clip_high": 0.2,
        }

    whole = call_loss(function, known(slice(None)))
    if not bool(whole.isfinite().all()):
        raise ValueError(f"loss {name!r} is not finite on finite numbers")
    if not whole.requires_grad:
        raise ValueError(
            f"loss {name!r} has no gradient; it must be computed from logprobs or ratio"
        )
    whole.sum().backward()
    gradient = torch.zeros_like(new) if new.grad is None else new.grad
    if not bool(gradient.isfinite().all()) or not bool((gradient[mask] != 0).all()):
        raise ValueError(f"loss {name!r} gives no finite gradient to some token with an advantage")
    if bool((gradient[~mask] != 0).any()):
        raise ValueError(f"loss {name!r} gives masked tokens a gradient; leave mask to turnwise")
    for row in range(len(mask)):
        _same(
            call_loss(function, known(slice(row, row + 1)))[0],
            whole[row],
            f"loss {name!r} mixes rows: a row alone has another loss; return the loss of each "
            "token from that token alone (means are algo.reduction's)",
        )


def _six_episodes() -> dict[str, Any]:
    """Six episodes of two or three turns in two groups, a reward on every turn's last token."""
    generator = torch.Generator().manual_seed(0)
    lengths = ((2, 3, 1), (4, 1), (1, 2, 3), (3, 3), (2, 2, 2), (1, 4))
    width = max(map(sum, lengths))
    turns = torch.full((6, width), -1)
    rewards = torch.zeros(6, width, dtype=torch.float64)
    for row, counts in enumerate(lengths):
        ids = [number for number, count in enumerate(counts) for _ in range(count)]
        turns[row, : len(ids)] = torch.tensor(ids)
        ends = torch.tensor(counts).cumsum(0) - 1
        rewards[row, ends] = torch.rand(len(counts), generator=generator, dtype=torch.float64)
    values = torch.randn(6, width, generator=generator, dtype=torch.float64)
    mask = turns >= 0
    return {
        "rewards": rewards,
        "mask": mask,
        "values": torch.where(mask, values, 0.0),
        "turn_ids": turns,
        "state_ids": turns.clone(),
        "group_ids": torch.tensor([0, 0, 0, 1, 1, 1]),
        "bootstrap": torch.zeros(6, dtype=torch.float64),
        "truncated": torch.zeros(6, dtype=torch.bool),
        "gamma": 0.97,
        "lam": 0.9,
        "high_level_gamma": 0.85,
        "high_level_lam": 0.9,
    }


def _same(found: Tensor, wanted: Tensor, complaint: str) -> None:
    gap = float((found.double() - wanted.double()).detach().abs().max())
    if not (math.isfinite(gap) and gap <= 1e-5):
        raise ValueError(complaint)
