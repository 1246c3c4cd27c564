"""The data of the list of runs and of the page of a run: state, outcome, findings, settings."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from turnwise.config.schema import Config
from turnwise.inspect.episode_rows import number
from turnwise.inspect.folder import MAX_WHOLE, Skips, why
from turnwise.inspect.runs import Run, Runs, stamp
from turnwise.json_lines import UNREADABLE
from turnwise.log.doctor import Diagnosis, diagnose, make_chart
from turnwise.log.outcome import stored_outcome
from turnwise.log.records import LedgerEntry, checked, event_row, number_row
from turnwise.log.store import merge_rows
from turnwise.types import Json

LIST_SECONDS = 0.4
"""Time that the first answer spends on runs that it does not know yet."""
EXAMINED = ("metrics.jsonl", "events.jsonl", "ledger.jsonl", "summary.json")
GROWING = ("metrics.jsonl", "timings.jsonl", "events.jsonl", "ledger.jsonl")
"""Files that are written a line at a time."""
Errors = Callable[[], Sequence[tuple[str, int]]]
"""Finds the most frequent errors of failed episodes."""
_UNTIL_THE_END = ("unfinished", "no_improvement")
"""Findings that say nothing while a run goes on."""


def list_runs(runs: Runs) -> dict[str, Json]:
    """The answer of /api/runs. What takes long is left out, and read by the next calls."""
    found, skipped = runs.scan()
    until = time.monotonic() + LIST_SECONDS
    rows: list[dict[str, Json]] = []
    for run in found:
        skips = Skips()
        rows.append(run_row(run, skips, until=until))
        skipped += [{"name": run.name, "reason": words} for words in skips.words()]
    root = ", ".join(str(root.name) for root in runs.roots)
    return {"root": root, "runs": rows, "skipped": skipped}


def run_row(
    run: Run, skips: Skips, *, until: float, running: bool | None = None
) -> dict[str, Json]:
    """One run of the list. Beyond the time `until`, only what costs nothing."""
    head = run.head
    late = not run.known and time.monotonic() > until
    config = None
    if not late:
        config = run.config(skips)[1]
        head.follow(run.folder, until=max(until, time.monotonic() + 0.01))
    summary = {} if late else run.summary(skips)
    before, after = (_success(summary.get(label)) for label in ("before", "after"))
    problems = None
    if run.findings is not None:
        problems = sum(one.severity == "problem" for one in run.findings)
    return {
        "name": run.name,
        "state": run.state(running=running),
        "step": head.step,
        "steps": _planned(config),
        "algorithm": config.algo.name if config else None,
        "env": env_names(config) if config else None,
        "model": (config.model.path or "embedded") if config else None,
        "seed": config.seed if config else None,
        "success_before": head.first if before is None else before,
        "success_after": head.last if after is None else after,
        "reward_last": number(head.reward),
        "updated": max(stamp(run.folder, name)[1] for name in (*EXAMINED, "config.yaml")) / 1e9,
        "problems": problems,
        **({"loading": True} if late else {}),
    }


def _planned(config: Config | None) -> int | None:
    """Steps of the whole run. None where the config does not say: imitation counts its own."""
    return (config.train.steps or None) if config else None


def run_json(
    run: Run, *, running: bool | None = None, errors: Errors | None = None
) -> dict[str, Json]:
    """The answer of /api/run/RUN.

    Args:
        running: whether the run goes on. None: as its lock says.
        errors: finds the most frequent errors of failed episodes. None: the index does.
    """
    skips = Skips()
    state = run.state(running=running)
    examine(run, skips, errors or run.index.errors)
    text, config = run.config(skips)
    run.head.follow(run.folder, until=time.monotonic() + 5.0)
    events = run.folder.rows("events.jsonl", event_row, skips)
    ledger = _ledger(run, skips)
    if state != "running":
        for name in GROWING:
            if run.folder.is_torn(name):
                skips.add(f"{name} ends in the middle of a line, which is left out")
    steps: dict[str, list[int]] = {"step": [], "eval": []}
    for file in run.folder.step_files("episodes"):
        steps[file.split].append(file.step)
    credit = [file.step for file in run.folder.step_files("credit") if file.size]
    return {
        "name": run.name,
        "state": state,
        "step": run.head.step,
        "steps_planned": _planned(config),
        "config": text,
        "outcome": run.outcome,
        "findings": [
            asdict(one)
            for one in run.findings or ()
            if not (state == "running" and one.name in _UNTIL_THE_END)
        ],
        "events": [_event(row) for row in _last_of_kind(events)],
        "ledger": {
            "steps": len(ledger),
            "sampled": sum(entry.sampled for entry in ledger),
            "trained": sum(entry.trained for entry in ledger),
            "broken": sum(entry.broken for entry in ledger),
        },
        "steps": steps,
        "credit_steps": credit,
        "skipped": skips.words(),
    }


def examine(run: Run, skips: Skips, errors: Errors) -> None:
    """Lets the doctor look at the run, if it changed since the last time. The run's own notices
    are no findings: they are shown as events."""
    now = tuple(stamp(run.folder, name) for name in (*EXAMINED, "config.yaml"))
    if run.examined != now:
        said = Skips()
        run.findings, run.outcome = _examined(run, said, errors, size=now[0][0])
        run.examined, run.said = now, said.words()
    for words in run.said:
        skips.add(words)


def _examined(
    run: Run, skips: Skips, errors: Errors, *, size: int
) -> tuple[list[Diagnosis] | None, list[dict[str, Json]]]:
    """(findings, outcome). The findings are None where the run cannot be examined.

    Args:
        size: of metrics.jsonl, in bytes.
    """
    config, summary = run.config(skips)[1], run.summary(skips)
    if size > MAX_WHOLE:
        skips.add(f"metrics.jsonl has more than {MAX_WHOLE} bytes: no diagnoses")
        return None, _outcome(summary, ())
    rows = run.folder.rows("metrics.jsonl", number_row, skips)
    outcome = _outcome(summary, rows)
    if config is None:
        return None, outcome
    events = run.folder.rows("events.jsonl", event_row, skips)
    chart = make_chart(config, rows, _ledger(run, skips), events, summary)
    if chart.total("rollout/failures"):
        chart = replace(chart, errors=tuple(errors()))
    kinds = {row["kind"] for row in events}
    try:
        return [one for one in diagnose(chart) if one.name not in kinds], outcome
    except UNREADABLE as error:  # numbers that no run writes
        skips.add(f"the doctor cannot make sense of this run: {why(error)}")
        return None, outcome


def _outcome(
    summary: Mapping[str, Json], rows: Sequence[Mapping[str, Json]]
) -> list[dict[str, Json]]:
    """Evaluations before and after training, and of the players that it is compared with."""
    summary = summary or stored_outcome(merge_rows(rows))
    stored: list[dict[str, Json]] = [
        *(summary[label] for label in ("before", "after") if summary.get(label)),
        *(summary.get("baselines") or []),
    ]
    names = ("label", "success", "reward", "episodes", "tasks")
    return [
        {"player": one.get("player", "policy")} | {name: one.get(name) for name in names}
        for one in stored
    ]


def env_names(config: Config) -> str:
    """The environments that the run plays."""
    return ", ".join(config.rollout.train.tags) or config.env.name


def _success(evaluated: Mapping[str, Json] | None) -> float | None:
    return evaluated["success"][1] if evaluated and evaluated.get("success") else None


def _ledger(run: Run, skips: Skips) -> list[LedgerEntry]:
    return run.folder.rows("ledger.jsonl", lambda row: checked(LedgerEntry(**row)), skips)


def _last_of_kind(events: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """The last notice of each kind, with their number."""
    counts: dict[str, int] = {}
    last: dict[str, Mapping[str, Json]] = {}
    for row in events:
        counts[row["kind"]] = counts.get(row["kind"], 0) + 1
        last[row["kind"]] = row
    return [{**row, "count": counts[kind]} for kind, row in last.items()]


def _event(row: Mapping[str, Json]) -> dict[str, Json]:
    step = row.get("step")
    return {
        "kind": row["kind"],
        "message": row["message"],
        "step": step if type(step) is int else None,
        "count": row["count"],
    }
