"""`turnwise doctor RUN`: named diagnoses with evidence and advice, from the run directory.

A diagnosis is a function from a Chart to a Diagnosis or None. It gives the measured values before
the advice. docs/metrics.md defines the metrics that it reads.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from turnwise.config.schema import GROUP_RELATIVE, Config
from turnwise.log.metrics import collapsed_steps
from turnwise.log.store import LedgerEntry, RunReader, merge_rows
from turnwise.types import Json

COLLAPSED_STEPS = 5
"""Consecutive collapsed steps before the diagnosis."""
COLLAPSE_ADVICE = (
    "more steps will not help: identical replies give no learning signal. "
    "Read some replies (`turnwise report RUN`). If the model never solved a task, make tasks "
    "easier, ask for a simpler reply (env.format) or begin with a model that succeeds sometimes; "
    "if it did, go back to an earlier checkpoint with a lower train.lr, with algo.kl_coef or "
    "algo.entropy_coef above 0, or with a higher rollout.temperature"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """A finding about a run."""

    name: str
    severity: Literal["problem", "warning", "note"]
    evidence: str
    advice: str
    metrics: tuple[str, ...] = ()
    """What it was read from: `turnwise inspect` shows it under these curves."""

    def __str__(self) -> str:
        return f"{self.severity.upper()} {self.name}: {self.evidence}\n  -> {self.advice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The input of diagnoses: the run's metrics in order of steps."""

    config: Config
    steps: int
    """Training steps done."""
    curves: Mapping[str, list[float]]
    """Finite values of each metric."""
    not_finite: Mapping[str, int] = field(default_factory=dict[str, int])
    """Metric -> the first step in which it was not finite."""
    ledger: tuple[LedgerEntry, ...] = ()
    events: tuple[Mapping[str, Json], ...] = ()
    summary: Mapping[str, Json] = field(default_factory=dict[str, Json])
    collapsed: int = 0
    """The last steps in a row in which every reply was the same and nothing succeeded."""
    errors: tuple[tuple[str, int], ...] = ()
    """Errors of failed episodes that are stored, the most frequent first."""

    def first(self, name: str) -> float | None:
        """The mean over the first tenth of the steps (one at least)."""
        values = self.curves.get(name, [])
        return _mean(values[: max(1, len(values) // 10)])

    def last(self, name: str) -> float | None:
        """The mean over the last fifth of the steps (one at least)."""
        values = self.curves.get(name, [])
        return _mean(values[-max(1, len(values) // 5) :])

    def total(self, name: str) -> float:
        return math.fsum(self.curves.get(name, []))


def read_chart(run: RunReader) -> Chart:
    """The chart of a run directory."""
    chart = make_chart(
        run.config, run.rows("metrics.jsonl"), run.ledger(), run.events(), run.summary()
    )
    if not chart.total("rollout/failures"):
        return chart
    errors: Counter[str] = Counter()
    for step in run.steps():
        for episode in run.episodes(step):
            if episode.error:
                errors[f"{episode.status.value}: {episode.error.splitlines()[0][:200]}"] += 1
    return replace(chart, errors=tuple(errors.most_common(3)))


def make_chart(
    config: Config,
    rows: Sequence[Mapping[str, Json]],
    ledger: Sequence[LedgerEntry],
    events: Sequence[Mapping[str, Json]],
    summary: Mapping[str, Json],
) -> Chart:
    """The chart of these rows of metrics.jsonl, ledger.jsonl and events.jsonl."""
    not_finite: dict[str, int] = {}
    for row in rows:
        for name in row.get("not_finite", {}):
            not_finite.setdefault(name, row["step"])
    merged = merge_rows(rows)
    names = {name for row in merged for name in row if name != "step"}
    return Chart(
        config=config,
        steps=max(
            (int(row["step"] or 0) for row in merged if "rollout/episodes" in row), default=0
        ),
        curves={
            name: [value for row in merged if (value := row.get(name)) is not None]
            for name in names
        },
        not_finite=not_finite,
        ledger=tuple(ledger),
        events=tuple(events),
        summary=summary,
        collapsed=collapsed_steps(merged),
    )


def diagnose(chart: Chart) -> list[Diagnosis]:
    """All diagnoses that apply, the gravest first.

    Example:
        >>> curves = {"rollout/format_valid": [1.0] * 50 + [0.1] * 50}
        >>> chart = Chart(config=Config(), steps=100, curves=curves)
        >>> [found.name for found in diagnose(chart)]
        ['format_collapse']
    """
    found = [diagnosis for check in CHECKS if (diagnosis := check(chart)) is not None]
    kinds = dict.fromkeys(
        str(event["kind"]) for event in chart.events if event["kind"] != "idle_step"
    )
    for kind in kinds:  # idle steps are counted above
        found.append(_from_events([event for event in chart.events if event["kind"] == kind]))
    order = ("problem", "warning", "note")
    return sorted(found, key=lambda diagnosis: order.index(diagnosis.severity))


def token_fidelity(chart: Chart) -> Diagnosis | None:
    broken = [
        entry.step
        for entry in chart.ledger
        if entry.broken or entry.sampled_sha256 != entry.trained_sha256
    ]
    if not broken:
        return None
    return Diagnosis(
        name="token_fidelity",
        severity="problem",
        evidence=(
            f"in {len(broken)} steps (first: {broken[0]}) the tokens trained on are not the tokens "
            "sampled"
        ),
        advice=(
            "stop: the policy is trained on text it did not say. Please report this with the "
            "run's ledger.jsonl"
        ),
    )


def not_finite(chart: Chart) -> Diagnosis | None:
    if not chart.not_finite:
        return None
    name, step = min(chart.not_finite.items(), key=lambda item: (item[1], item[0]))
    return Diagnosis(
        name="not_finite",
        severity="problem",
        metrics=tuple(sorted(chart.not_finite)),
        evidence=(
            f"{len(chart.not_finite)} metrics were not finite; the first was {name} in step {step}"
        ),
        advice=(
            "resume from a checkpoint before that step with a lower train.lr, and check the "
            "environment's rewards"
        ),
    )


def zero_variance_groups(chart: Chart) -> Diagnosis | None:
    share = chart.last("rollout/zero_variance_groups")
    if share is None or share < 0.7:
        return None
    relative = chart.config.algo.name in GROUP_RELATIVE
    success = chart.last("rollout/success")
    if success is not None and success > 0.9:
        return Diagnosis(
            name="zero_variance_groups",
            severity="note",
            metrics=("rollout/zero_variance_groups",),
            evidence=f"{share:.0%} of the groups have one reward, because success is {success:.0%}",
            advice="the tasks are solved; take harder ones if there is more to learn",
        )
    return Diagnosis(
        name="zero_variance_groups",
        severity="problem" if relative else "warning",
        metrics=("rollout/zero_variance_groups",),
        evidence=(
            f"in {share:.0%} of the groups every episode got the same reward (mean over the last "
            "steps)"
        ),
        advice=(
            "within such a group nothing is better than anything else"
            + (f", so {chart.config.algo.name} learns nothing from it" if relative else "")
            + "; use easier tasks or a reward with intermediate parts, raise "
            "rollout.train.group_size or rollout.temperature, or set algo.filter: dynamic to spend "
            "the update on the others"
        ),
    )


def idle_steps(chart: Chart) -> Diagnosis | None:
    share = _mean(chart.curves.get("train/idle", []))
    if share is None or share <= 0.1:
        return None
    return Diagnosis(
        name="idle_steps",
        severity="problem" if share > 0.5 else "warning",
        metrics=("train/idle",),
        evidence=f"{share:.0%} of the steps changed nothing: no episode had an advantage",
        advice=(
            "every reward was the same; see zero_variance_groups, and look at episodes with "
            "`turnwise inspect`"
        ),
    )


def collapsed(chart: Chart) -> Diagnosis | None:
    limit = chart.config.train.max_collapsed_steps or COLLAPSED_STEPS
    if chart.collapsed < min(limit, COLLAPSED_STEPS):
        return None
    top = chart.curves["rollout/top_reply"][-1]
    return Diagnosis(
        name="collapsed",
        severity="problem",
        metrics=("rollout/top_reply", "rollout/success"),
        evidence=(
            f"every reply is the same and nothing succeeds: in the last {chart.collapsed} steps no "
            f"episode succeeded, and {top:.0%} of the replies are one text (in each environment "
            "and role)"
        ),
        advice=COLLAPSE_ADVICE,
    )


def template_collapse(chart: Chart) -> Diagnosis | None:
    if collapsed(chart) is not None:  # which says more
        return None
    top, states = chart.last("rollout/top_reply"), chart.last("rollout/distinct_states")
    turns = (chart.last("rollout/turns") or 0.0) * (chart.last("rollout/episodes") or 0.0)
    if top is None or states is None or top < 0.8 or states * turns < 8:
        return None
    solved = (chart.last("rollout/success") or 0.0) > 0.9
    return Diagnosis(
        name="template_collapse",
        severity="note" if solved else "problem",
        metrics=("rollout/top_reply",),
        evidence=(
            f"{top:.0%} of all replies are the same text, over about {states * turns:.0f} "
            "different states"
        ),
        advice=(
            "the policy no longer reads the state; go back to an earlier checkpoint, lower "
            "train.lr, add algo.kl_coef "
            "or algo.entropy_coef, and filter groups by variance (algo.filter: variance_top_p, "
            "filter_keep: 0.9)"
        ),
    )


def blind_policy(chart: Chart) -> Diagnosis | None:
    share, states = (
        chart.last("rollout/observation_information"),
        chart.last("rollout/distinct_states"),
    )
    turns = (chart.last("rollout/turns") or 0.0) * (chart.last("rollout/episodes") or 0.0)
    if share is None or states is None or share >= 0.05 or chart.steps < 5 or states * turns < 8:
        return None
    if (chart.last("rollout/success") or 0.0) > 0.9:
        return None
    return Diagnosis(
        name="blind_policy",
        severity="problem",
        metrics=("rollout/observation_information",),
        evidence=(
            f"the policy does not depend on the observation: what it sees decides {share:.1%} of "
            f"the choice between its replies, over about {states * turns:.0f} different states"
        ),
        advice=(
            "check in `turnwise inspect` that the observation is in the context (rollout.window, "
            "rollout.max_context). A small model learns to read from a warm start with the loss on "
            "observations (model.embedded.warmstart_observations: true) and many different tasks a "
            "step (rollout.train.env_groups)"
        ),
    )


def no_better_than_blind(chart: Chart) -> Diagnosis | None:
    after: Mapping[str, Json] = chart.summary.get("after") or {}
    blind = [one for one in chart.summary.get("baselines") or () if "blind" in one["player"]]
    if not after.get("success") or not blind or not blind[0]["success"]:
        return None
    (low, reached, _), (_, unseeing, _) = after["success"], blind[0]["success"]
    if low > unseeing:
        return None
    return Diagnosis(
        name="no_better_than_blind",
        severity="problem",
        metrics=("eval/success",),
        evidence=(
            f"held-out success is {reached:.1%}, and a player that never looks reaches "
            f"{unseeing:.1%} on the same tasks"
        ),
        advice=(
            "what was learned need not come from the observations; see blind_policy, train longer, "
            "or make tasks on which no fixed sequence of actions wins"
        ),
    )


def entropy_gone(chart: Chart) -> Diagnosis | None:
    name = "train/entropy" if "train/entropy" in chart.curves else "rollout/logprob"
    first, last = chart.first(name), chart.last(name)
    if first is None or last is None or chart.steps < 5:
        return None
    first, last = abs(first), abs(last)
    success = chart.last("rollout/success")
    if last > 0.1 * first or last > 0.05 or (success is not None and success > 0.9):
        return None
    return Diagnosis(
        name="entropy_gone",
        severity="problem",
        metrics=(name,),
        evidence=f"the entropy per token fell from {first:.3g} to {last:.3g} nats"
        + ("" if success is None else f" while success is {success:.0%}"),
        advice=(
            "the policy has stopped exploring before it solved the tasks; resume from an earlier "
            "checkpoint with "
            "algo.entropy_coef: 0.001 to 0.01, a larger algo.clip_high, or a lower train.lr"
        ),
    )


def length_growth(chart: Chart) -> Diagnosis | None:
    first, last = chart.first("rollout/reply_tokens"), chart.last("rollout/reply_tokens")
    cut = chart.last("rollout/cut_replies") or 0.0
    grown = first is not None and last is not None and chart.steps >= 5 and last > 2 * first
    if not grown and cut < 0.2:
        return None
    sizes = (
        ""
        if first is None or last is None
        else f"replies went from {first:.0f} to {last:.0f} tokens; "
    )
    return Diagnosis(
        name="length_growth",
        severity="problem" if cut > 0.5 else "warning",
        metrics=("rollout/reply_tokens", "rollout/cut_replies"),
        evidence=f"{sizes}{cut:.0%} of them are cut at rollout.max_response_tokens",
        advice=(
            "a cut reply has no end-of-turn token and mostly no action; raise "
            "rollout.max_response_tokens, or make "
            "length cost something (env.shaping.turn_cost, algo.reduction: episode_mean or "
            "token_sum_norm)"
        ),
    )


def format_collapse(chart: Chart) -> Diagnosis | None:
    last = chart.last("rollout/format_valid")
    best = max(chart.curves.get("rollout/format_valid", []), default=None)
    if last is None or best is None or (last > 0.5 and best - last < 0.3):
        return None
    fell = best - last >= 0.3
    return Diagnosis(
        name="format_collapse",
        severity="problem" if fell else "warning",
        metrics=("rollout/format_valid",),
        evidence=f"only {last:.0%} of the replies hold an action"
        + (f", down from {best:.0%}" if fell else ""),
        advice=(
            "look at the replies (`turnwise inspect`); if the model never knew the form, simplify "
            "env.format (think: "
            "false, style: raw) or warm it up; if it forgot it, lower train.lr or make "
            "env.format.format_penalty felt"
        ),
    )


def empty_thoughts(chart: Chart) -> Diagnosis | None:
    share = chart.last("rollout/thought_empty")
    if share is None or share < 0.5 or not _asks_for_thoughts(chart.config):
        return None
    return Diagnosis(
        name="empty_thoughts",
        severity=_thought_severity(chart),
        metrics=("rollout/thought_empty",),
        evidence=f"{share:.0%} of the thoughts are empty, and env.format.think asks for them",
        advice=(
            "the policy answers without thinking. If it does no worse, set env.format.think: false "
            "and save the tokens; if it should think, begin with a model that does, and leave it "
            "room (rollout.max_response_tokens)"
        ),
    )


def copied_thoughts(chart: Chart) -> Diagnosis | None:
    share = chart.last("rollout/thought_copied")
    if share is None or share < 0.5 or not _asks_for_thoughts(chart.config):
        return None
    distinct = chart.last("rollout/thought_distinct") or 0.0
    return Diagnosis(
        name="copied_thoughts",
        severity=_thought_severity(chart),
        metrics=("rollout/thought_copied",),
        evidence=(
            f"{share:.0%} of the thoughts stand word for word in the prompt; {distinct:.0%} of the "
            "thoughts are different"
        ),
        advice=(
            "the policy repeats what it reads instead of reasoning. Compare `turnwise eval RUN` "
            "with and without --without-thought: if success is the same, set env.format.think: "
            "false; take examples of thoughts out of env.system_prompt; add algo.kl_coef"
        ),
    )


def _asks_for_thoughts(config: Config) -> bool:
    return any(
        env.format.think and env.format.style == "answer"
        for env in (config.env, *config.envs.values())
    )


def _thought_severity(chart: Chart) -> Literal["warning", "note"]:
    return "note" if (chart.last("rollout/success") or 0.0) > 0.9 else "warning"


def critic_useless(chart: Chart) -> Diagnosis | None:
    last = chart.last("critic/explained_variance")
    if last is None or last > 0.05 or chart.steps < 5:
        return None
    return Diagnosis(
        name="critic_useless",
        severity="warning" if last > -0.5 else "problem",
        metrics=("critic/explained_variance",),
        evidence=f"the critic explains {last:.1%} of the variance of the returns",
        advice=(
            "advantages are then as noisy as the returns themselves; raise train.critic_lr, give "
            "it "
            "train.critic_warmup steps alone, or use a group-relative algorithm that needs none "
            "(algo.name: grpo)"
        ),
    )


def sampler_mismatch(chart: Chart) -> Diagnosis | None:
    mean, largest = (
        chart.last("train/gap_mean"),
        max(chart.curves.get("train/gap_max", []), default=0.0),
    )
    if mean is None or mean < 0.01:
        return None
    return Diagnosis(
        name="sampler_mismatch",
        severity="problem" if mean > 0.05 else "warning",
        metrics=("train/gap_mean", "train/gap_max"),
        evidence=(
            f"sampler and trainer differ by {mean:.3g} per token in log-prob (largest "
            f"{largest:.3g})"
        ),
        advice=(
            "set algo.tis_cap: 2.0, sample and train in the same precision (model.dtype), or keep "
            "the sampler's weights fresher"
        ),
    )


def environment_failures(chart: Chart) -> Diagnosis | None:
    failures, played = chart.total("rollout/failures"), chart.total("rollout/episodes")
    retries = chart.total("rollout/retries")
    share = failures / max(failures + played, 1.0)
    if share < 0.005 and retries <= 0.02 * played:
        return None
    seen = "; ".join(f"{count} x {error}" for error, count in chart.errors)
    return Diagnosis(
        name="environment_failures",
        severity="problem" if share > 0.1 else "warning",
        metrics=("rollout/failures", "rollout/retries"),
        evidence=f"{failures:.0f} of {failures + played:.0f} episodes failed, "
        f"{retries:.0f} were started again" + (f" ({seen})" if seen else ""),
        advice="failed episodes are dropped, never rewarded; run `turnwise check-env NAME`, raise "
        "rollout.step_timeout, or isolate the environment with rollout.isolation: process",
    )


def turn_limit(chart: Chart) -> Diagnosis | None:
    share, success = chart.last("rollout/status/truncated_turns"), chart.last("rollout/success")
    single = (chart.last("rollout/turns") or 0.0) <= 1.0
    if share is None or share < 0.6 or single or (success is not None and success > 0.5):
        return None
    settings = chart.config
    limit = (
        f"train.max_turn is {settings.train.max_turn}"
        if settings.env.max_turn is None
        else f"env.max_turn is {settings.env.max_turn}"
    )
    return Diagnosis(
        name="turn_limit",
        severity="warning",
        metrics=("rollout/status/truncated_turns",),
        evidence=(f"{share:.0%} of the episodes end at the turn limit ({limit})"),
        advice=(
            "if that is too few to reach the goal, raise train.max_turn or "
            "env.format.max_actions_per_turn"
        ),
    )


def large_updates(chart: Chart) -> Diagnosis | None:
    clipped, kl = chart.last("train/clip_fraction"), chart.last("train/approx_kl")
    if (clipped is None or clipped < 0.4) and (kl is None or kl < 0.1):
        return None
    return Diagnosis(
        name="large_updates",
        severity="warning",
        metrics=("train/clip_fraction", "train/approx_kl"),
        evidence=(
            f"{clipped or 0.0:.0%} of the tokens are clipped, the policy moves by KL "
            f"{kl or 0.0:.3g} in a step"
        ),
        advice="lower train.lr, train.epochs or train.mini_batches, or set train.target_kl: 0.02",
    )


def no_improvement(chart: Chart) -> Diagnosis | None:
    before, after = chart.summary.get("before"), chart.summary.get("after")
    if not before or not after:
        return None
    key = "success" if before.get("success") and after.get("success") else "reward"
    (low, old, _), (_, new, high) = before[key], after[key]
    if None in (low, high) or after[key][0] > before[key][2]:
        return None
    worse = high < low
    return Diagnosis(
        name="no_improvement",
        severity="problem" if worse else "warning",
        metrics=(f"eval/{key}",),
        evidence=f"held-out {key} went from {old:.3f} to {new:.3f}"
        + (", which is worse" if worse else "; the 95 % intervals overlap"),
        advice=(
            "train longer, or see the other diagnoses; `turnwise eval RUN --against before` says "
            "how many more episodes would settle a small difference"
        ),
    )


def unfinished(chart: Chart) -> Diagnosis | None:
    if chart.summary or chart.steps >= chart.config.train.steps:
        return None
    return Diagnosis(
        name="unfinished",
        severity="note",
        evidence=(
            f"{chart.steps} of {chart.config.train.steps} steps are written, and there is no "
            "summary"
        ),
        advice=(
            "it is still running, or was stopped: `turnwise train --resume RUN` goes on from the "
            "last checkpoint"
        ),
    )


CHECKS: tuple[Callable[[Chart], Diagnosis | None], ...] = (
    token_fidelity,
    not_finite,
    collapsed,  # before what follows from it
    zero_variance_groups,
    idle_steps,
    template_collapse,
    blind_policy,
    no_better_than_blind,
    entropy_gone,
    length_growth,
    format_collapse,
    empty_thoughts,
    copied_thoughts,
    critic_useless,
    sampler_mismatch,
    environment_failures,
    turn_limit,
    large_updates,
    no_improvement,
    unfinished,
)


def _from_events(events: list[Mapping[str, Json]]) -> Diagnosis:
    """The run's own notices; for several of a kind, the last one and their number."""
    kind, last = str(events[-1]["kind"]), events[-1]
    where = "" if last.get("step") is None else f" (step {last['step']})"
    times = f"{len(events)} times, last: " if len(events) > 1 else ""
    fell_back = "fallback" in kind
    return Diagnosis(
        name=kind,
        severity="problem" if fell_back else "note",
        evidence=f"{times}{last['message']}{where}",
        advice="this run does not train what was asked for; mend the cause and start again"
        if fell_back
        else "for your information",
    )


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
