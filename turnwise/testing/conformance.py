# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""check_estimator: checks that an advantage estimator assigns credit correctly in multi-turn
conversations.

An estimator is one function:

    fn(token_level_rewards, values, loss_mask, gamma, lam, *, ...) -> advantages, or (advantages,
    returns)

The first three are [B, T] tensors (float, float, bool), a row is an episode, position t refers to
the choice of token t, and a turn's reward is on its last token. From the keywords

    high_level_gamma (float), turn_ids and state_ids [B, T], bootstrap, group_ids, episode_ids [B]

the function is given those that it names in its signature. It may raise where it refuses; that is a
failed check. What does not apply (no `bootstrap` to give) is skipped and said so, never passed
silently.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from turnwise.testing import reference as slow

Estimator = Callable[..., Any]
Outcome = Literal["passed", "failed", "skipped"]
Reference = Literal["token_gae", "bi_level_gae", "turn_gae"]
KEYWORDS = ("high_level_gamma", "turn_ids", "state_ids", "bootstrap", "group_ids", "episode_ids")
GAMMA, LAM, HIGH_LEVEL_GAMMA = 0.97, 0.9, 0.85


class ConformanceError(AssertionError):
    """An estimator failed a check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One named check: its outcome and the measured values."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The findings of `check_estimator`.

    Example:
        >>> result = CheckResult(name="padding", outcome="failed", detail="differs by 0.5")
        >>> report = Report(estimator="mine", results=(result,))
        >>> report.passed, report.failures
        (False, ('padding',))
    """

    estimator: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """True where no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(result.name for result in self.results if result.outcome == "failed")

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(result.name for result in self.results if result.outcome == "skipped")

    def raise_if_failed(self) -> "Report":
        """The report itself. Raises ConformanceError with the whole table where a check failed."""
        if not self.passed:
            raise ConformanceError(str(self))
        return self

    def __str__(self) -> str:
        lines = [f"{self.estimator}: {len(self.failures)} of {len(self.results)} checks failed"]
        lines += [f"  {result.outcome:8}{result.name:24}{result.detail}" for result in self.results]
        return "\n".join(lines)


def check_estimator(
    fn: Estimator,
    *,
    reference: Reference | Estimator | None = None,
    name: str | None = None,
    atol: float = 1e-5,
    seed: int = 0,
) -> Report:
    """A report of named checks on an estimator. Runs in milliseconds on the CPU and changes nothing
    global.

    Args:
        fn: The estimator (see the module for the contract).
        reference: What it should compute: a name of ours (plain loops), or a function of the same
            contract.
        name: What the report calls it. None: the function's own name.
        atol: Largest difference between two numbers that count as equal; inputs are float64 of size
            about 1.
        seed: Draws the numbers of the episodes.

    Example:
        >>> def monte_carlo(token_level_rewards, values, loss_mask, gamma, lam):
        ...     returns = (token_level_rewards * loss_mask).sum(-1, keepdim=True)
        ...     return torch.where(loss_mask, returns - values, 0.0)
        >>> check_estimator(monte_carlo).failures
        ('nan_outside_mask',)
    """
    checks: dict[str, Callable[[_Subject], str]] = {
        "shape": _shape,
        "inputs_untouched": _inputs_untouched,
        "observation_insertion": _observation_insertion,
        "adjacent_turns": _adjacent_turns,
        "padding": _padding,
        "permutation": _permutation,
        "empty_row": _empty_row,
        "nan_outside_mask": _nan_outside_mask,
        "zero_reward_turns": _zero_reward_turns,
        "all_zero_rewards": _all_zero_rewards,
        "single_token_turns": _single_token_turns,
        "bootstrap": _bootstrap,
        "brute_force": _brute_force,
    }
    generator = torch.Generator().manual_seed(seed)
    subject = _Subject(
        fn=fn,
        accepts=_accepted(fn),
        episodes=_draw_episodes(generator),
        reference=reference,
        atol=atol,
    )
    results: list[CheckResult] = []
    for check, run in checks.items():
        try:
            outcome, detail = "passed", run(subject)
        except _Skip as skip:
            outcome, detail = "skipped", str(skip)
        except ConformanceError as error:
            outcome, detail = "failed", str(error)
        except Exception as error:
            # A crash is a finding about the estimator, and the other checks still run.
            outcome, detail = "failed", f"raised {type(error).__name__}: {error}"
        results.append(CheckResult(name=check, outcome=outcome, detail=detail))
    label = name if name is not None else str(fn.__name__ if inspect.isfunction(fn) else fn)
    return Report(estimator=label, results=tuple(results))


class _Skip(Exception):
    """A check does not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    values: Tensor  # [L]
    rewards: Tensor  # [L]
    state: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Episode:
    turns: tuple[_Turn, ...]
    group: int
    bootstrap: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Episodes written out as tensors."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    turn_ids: Tensor
    state_ids: Tensor
    bootstrap: Tensor
    group_ids: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    fn: Estimator
    accepts: frozenset[str]
    episodes: tuple[_Episode, ...]
    reference: Reference | Estimator | None
    atol: float

    def run(self, case: _Case) -> tuple[Tensor, ...]:
        """The result of the estimator for a case: (advantages,) or (advantages, returns)."""
        found = self.fn(
            case.rewards, case.values, case.mask, GAMMA, LAM, **_extras(case, self.accepts)
        )
        return (found,) if isinstance(found, Tensor) else tuple(found)

    def actions(self, case: _Case) -> list[Tensor]:
        """The estimator's results on action tokens only, row by row."""
        outputs = self.run(case)
        return [
            torch.stack([output[row][case.mask[row]] for output in outputs])
            for row in range(len(case.mask))
        ]

    def compare(self, wanted: Sequence[Tensor], case: _Case, what: str) -> str:
        """Raises ConformanceError where the case's action tokens do not get the wanted numbers."""
        gap = max(
            (_gap(a, b) for a, b in zip(wanted, self.actions(case), strict=True)), default=0.0
        )
        if not gap <= self.atol:
            raise ConformanceError(f"{what} changed an action token's numbers by {gap:.3g}")
        return f"largest difference {gap:.1e}"


def _shape(subject: _Subject) -> str:
    case = _render(subject.episodes)
    for output in subject.run(case):
        if output.shape != case.mask.shape or not output.is_floating_point():
            raise ConformanceError(
                f"wanted floats of shape {tuple(case.mask.shape)}, got {output.dtype} "
                f"{output.shape}"
            )
        if not bool(output.isfinite().all()):
            raise ConformanceError("finite inputs gave numbers that are not")
    return "one finite number per position"


def _inputs_untouched(subject: _Subject) -> str:
    case, same = _render(subject.episodes), _render(subject.episodes)
    subject.run(case)
    for name in ("rewards", "values", "mask", "turn_ids"):
        if not torch.equal(getattr(case, name), getattr(same, name)):
            raise ConformanceError(f"the estimator wrote into its {name}")
    return "inputs are as they were"


def _observation_insertion(subject: _Subject) -> str:
    wanted = subject.actions(_render(subject.episodes, gap=1))
    return subject.compare(wanted, _render(subject.episodes, gap=5), "inserting observation tokens")


def _adjacent_turns(subject: _Subject) -> str:
    if "turn_ids" not in subject.accepts:
        raise _Skip("takes no turn_ids, so turns that touch cannot be told apart")
    wanted = subject.actions(_render(subject.episodes, gap=3))
    return subject.compare(
        wanted, _render(subject.episodes, gap=0), "removing all observations between turns"
    )


def _padding(subject: _Subject) -> str:
    wanted = subject.actions(_render(subject.episodes))
    return subject.compare(wanted, _render(subject.episodes, pad=7), "padding on the right")


def _permutation(subject: _Subject) -> str:
    wanted = subject.actions(_render(subject.episodes))
    order = [2, 5, 0, 3, 1, 4]
    return subject.compare(
        [wanted[i] for i in order],
        _render(tuple(subject.episodes[i] for i in order)),
        "another order of the rows",
    )


def _empty_row(subject: _Subject) -> str:
    wanted = subject.actions(_render(subject.episodes))
    silent = _Episode(turns=(), group=0)
    nothing = torch.zeros(wanted[0].shape[0], 0, dtype=torch.float64)
    return subject.compare(
        [*wanted, nothing], _render((*subject.episodes, silent)), "a row without action tokens"
    )


def _nan_outside_mask(subject: _Subject) -> str:
    case = _render(subject.episodes)
    wanted = subject.actions(case)
    nan = torch.full_like(case.rewards, torch.nan)
    dirty = replace(
        case,
        rewards=torch.where(case.mask, case.rewards, nan),
        values=torch.where(case.mask, case.values, nan),
    )
    for output in subject.run(dirty):
        if not bool(output.isfinite().all()):
            raise ConformanceError("NaN outside the mask reached the output")
    return subject.compare(wanted, dirty, "NaN outside the mask")


def _zero_reward_turns(subject: _Subject) -> str:
    """A reward of 0 must act like a reward close to 0. Fails for estimators that find turns by
    non-zero rewards."""
    tiny = 1e-5
    gaps: list[float] = []
    for turn in range(3):
        exact, almost = (
            _with_reward(subject.episodes, turn=turn, reward=reward) for reward in (0.0, tiny)
        )
        pairs = zip(subject.actions(_render(exact)), subject.actions(_render(almost)), strict=True)
        gaps.append(max(_gap(a, b) for a, b in pairs))
    if not max(gaps) <= 1e3 * tiny:
        raise ConformanceError(
            f"a turn's reward of 0 instead of {tiny:g} changed an advantage by {max(gaps):.3g}"
        )
    return f"largest jump {max(gaps):.1e}"


def _all_zero_rewards(subject: _Subject) -> str:
    case = _render(subject.episodes)
    silent = replace(
        case, rewards=torch.zeros_like(case.rewards), bootstrap=torch.zeros_like(case.bootstrap)
    )
    if not all(bool(output.isfinite().all()) for output in subject.run(silent)):
        raise ConformanceError("rewards that are all 0 gave numbers that are not finite")
    blank = replace(silent, values=torch.zeros_like(case.values))
    largest = max((float(row.abs().max()) for row in subject.actions(blank)), default=0.0)
    if largest > subject.atol:
        raise ConformanceError(
            f"no reward and no value anywhere, and yet an advantage of {largest:.3g}"
        )
    return "nothing comes from nothing"


def _single_token_turns(subject: _Subject) -> str:
    short = tuple(
        replace(
            episode,
            turns=tuple(
                replace(turn, values=turn.values[-1:], rewards=turn.rewards[-1:])
                for turn in episode.turns
            ),
        )
        for episode in subject.episodes
    )
    wanted = subject.actions(_render(short, gap=1))
    if not all(bool(row.isfinite().all()) for row in wanted):
        raise ConformanceError("turns of one token gave numbers that are not finite")
    return subject.compare(
        wanted, _render(short, gap=4), "inserting observations between turns of one token"
    )


def _bootstrap(subject: _Subject) -> str:
    """A truncated episode's last state is worth V': exactly as if the last reward had been larger
    by gamma * V'."""
    if "bootstrap" not in subject.accepts:
        raise _Skip("takes no bootstrap, so a truncated episode counts as one that terminated")
    value = 2.0
    cut = (replace(subject.episodes[0], bootstrap=value), *subject.episodes[1:])
    ended = subject.actions(_render(subject.episodes))
    truncated = subject.actions(_render(cut))
    if max(_gap(a, b) for a, b in zip(ended, truncated, strict=True)) <= subject.atol:
        raise ConformanceError(
            "a truncated episode got the numbers of a terminated one: the bootstrap is not used"
        )
    gaps: list[float] = []
    for discount in (GAMMA, HIGH_LEVEL_GAMMA):
        first = subject.episodes[0]
        last = first.turns[-1]
        richer = last.rewards.clone()
        richer[-1] += discount * value
        paid = replace(first, turns=(*first.turns[:-1], replace(last, rewards=richer)))
        rows = subject.actions(_render((paid, *subject.episodes[1:])))
        gaps.append(max(_gap(a[:1], b[:1]) for a, b in zip(truncated, rows, strict=True)))
    if not min(gaps) <= subject.atol:
        raise ConformanceError(
            f"the bootstrap is not worth its discounted value: off by {min(gaps):.3g}"
        )
    return f"largest difference {min(gaps):.1e}"


def _brute_force(subject: _Subject) -> str:
    if subject.reference is None:
        raise _Skip("no reference was named")
    gaps: list[float] = []
    for gap in (1, 3):
        case = _render(subject.episodes, gap=gap, pad=2)
        outputs = subject.run(case)
        wanted = _reference(subject.reference, case, subject.accepts)
        pairs = list(zip(outputs, wanted, strict=False))
        gaps += [_gap(a[case.mask], b[case.mask]) for a, b in pairs]
    if not max(gaps) <= subject.atol:
        raise ConformanceError(f"differs from the reference by {max(gaps):.3g}")
    return f"largest difference {max(gaps):.1e}"


def _reference(
    reference: Reference | Estimator, case: _Case, accepts: frozenset[str]
) -> tuple[Tensor, ...]:
    if not isinstance(reference, str):
        accepted = _accepted(reference)
        found = reference(
            case.rewards, case.values, case.mask, GAMMA, LAM, **_extras(case, accepted)
        )
        return (found,) if isinstance(found, Tensor) else tuple(found)
    inputs = (case.rewards.tolist(), case.values.tolist(), case.mask.tolist())
    bootstrap = case.bootstrap.tolist() if "bootstrap" in accepts else None
    if reference == "token_gae":
        lists = slow.token_gae(*inputs, gamma=GAMMA, lam=LAM, bootstrap=bootstrap)
    elif reference == "turn_gae":
        lists = slow.turn_gae(
            *inputs, gamma=GAMMA, lam=LAM, turn_ids=case.turn_ids.tolist(), bootstrap=bootstrap
        )
    else:
        lists = slow.bi_level_gae(
            *inputs,
            gamma=GAMMA,
            lam=LAM,
            high_level_gamma=HIGH_LEVEL_GAMMA,
            turn_ids=case.turn_ids.tolist(),
            bootstrap=bootstrap,
        )
    return tuple(torch.tensor(rows, dtype=torch.float64) for rows in lists)


def _accepted(fn: Estimator) -> frozenset[str]:
    return frozenset(inspect.signature(fn).parameters) & frozenset(KEYWORDS)


def _extras(case: _Case, accepts: frozenset[str]) -> dict[str, Any]:
    offered: dict[str, Any] = {
        "high_level_gamma": HIGH_LEVEL_GAMMA,
        "turn_ids": case.turn_ids,
        "state_ids": case.state_ids,
        "bootstrap": case.bootstrap,
        "group_ids": case.group_ids,
        "episode_ids": torch.arange(case.mask.shape[0]),
    }
    return {name: value for name, value in offered.items() if name in accepts}


def _draw_episodes(generator: torch.Generator) -> tuple[_Episode, ...]:
    """Six episodes of three turns in two groups; every turn has a reward, so that no check hides
    behind a zero."""
    lengths = ((2, 3, 1), (4, 1, 2), (1, 2, 3), (3, 3, 2), (2, 2, 2), (1, 4, 1))
    episodes: list[_Episode] = []
    for number, row in enumerate(lengths):
        turns: list[_Turn] = []
        for turn, length in enumerate(row):
            rewards = torch.zeros(length, dtype=torch.float64)
            rewards[-1] = 0.5 + torch.rand((), generator=generator, dtype=torch.float64)
            values = torch.randn(length, generator=generator, dtype=torch.float64)
            turns.append(_Turn(values=values, rewards=rewards, state=turn))
        episodes.append(_Episode(turns=tuple(turns), group=number // 3))
    return tuple(episodes)


def _with_reward(
    episodes: tuple[_Episode, ...], *, turn: int, reward: float
) -> tuple[_Episode, ...]:
    """The episodes, with this reward for this turn of the first of them."""
    first = episodes[0]
    changed = replace(first.turns[turn], rewards=first.turns[turn].rewards.clone())
    changed.rewards[-1] = reward
    turns = tuple(changed if k == turn else old for k, old in enumerate(first.turns))
    return (replace(first, turns=turns), *episodes[1:])


def _render(episodes: Sequence[_Episode], *, gap: int = 2, pad: int = 1) -> _Case:
    """The episodes as right-padded rows: `gap` observation tokens before every turn, `pad` more
    than needed at the end.

    Positions outside the mask hold numbers that an estimator must not read, so that one that reads
    them fails.
    """
    width = max(sum(gap + len(turn.values) for turn in episode.turns) for episode in episodes) + pad
    shape = (len(episodes), width)
    junk = torch.Generator().manual_seed(gap * 31 + pad)
    rewards = torch.zeros(shape, dtype=torch.float64)
    values = 10.0 * torch.randn(shape, generator=junk, dtype=torch.float64)
    mask = torch.zeros(shape, dtype=torch.bool)
    turn_ids = torch.full(shape, -1)
    state_ids = torch.full(shape, -1)
    for row, episode in enumerate(episodes):
        at = 0
        for number, turn in enumerate(episode.turns):
            span = slice(at + gap, at + gap + len(turn.values))
            rewards[row, span], values[row, span], mask[row, span] = turn.rewards, turn.values, True
            turn_ids[row, span], state_ids[row, span] = number, turn.state
            at = span.stop
    return _Case(
        rewards=rewards,
        values=values,
        mask=mask,
        turn_ids=turn_ids,
        state_ids=state_ids,
        bootstrap=torch.tensor([episode.bootstrap for episode in episodes], dtype=torch.float64),
        group_ids=torch.tensor([episode.group for episode in episodes]),
    )


def _gap(a: Tensor, b: Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    gap = float((a.double() - b.double()).abs().max())
    return gap if gap == gap else float("inf")  # a comparison with NaN is always false
