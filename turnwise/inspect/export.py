"""A run, a comparison or an episode as one file: the page with the answers that it asks for."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from turnwise.inspect.answers import groups_json, whole_episode
from turnwise.inspect.compare import compare_runs
from turnwise.inspect.episode_rows import EpisodeRow, read_rows
from turnwise.inspect.folder import InspectError, Skips, step_name
from turnwise.inspect.follow import read_all
from turnwise.inspect.gantt import gantt_json
from turnwise.inspect.overview import run_json, run_row
from turnwise.inspect.page_files import single_page
from turnwise.inspect.runs import Run, Runs, printable
from turnwise.log.metrics import judged
from turnwise.types import Json, Status

MOST_STEPS = 8
"""Steps whose episodes are in an export where none are asked for."""
MOST_ROWS = 1000
"""Rows of metrics in an export; a longer run is thinned out."""
Data = dict[str, Json]
Place = tuple[str, int]
"""(split, step)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Which episodes an export holds."""

    episodes: int = 6
    """Of a step, from the best to the worst."""
    steps: Sequence[int] | None = None
    """None: some from the first to the last, and the last evaluation."""
    most: int = MOST_STEPS
    one: tuple[str, int, int] | None = None
    """(split, step, row): this episode alone."""


def export_run(run: Run, chosen: Chosen, *, running: bool | None = None) -> str:
    """The page of a run with some of its episodes.

    Args:
        running: whether the run goes on. None: as its lock says.
    """
    data, note = run_data(run, chosen, running=running)
    name = encoded(run.name)
    start, kind = f"#/run/{name}", "run"
    if chosen.one is not None:
        start, kind = "/".join((start, *map(str, chosen.one))), "episode"
    going_on = data[f"/api/run/{name}"]["state"] == "running"
    data["export"] = {"kind": kind, "start": start, "running": going_on, "note": note}
    return single_page(short(data), title=run.name)


def export_comparison(paths: Sequence[Path]) -> str:
    """The page that compares these runs: settings, curves, a paired test. Without episodes."""
    runs = Runs(paths).scan()[0]
    if len(runs) < 2:
        raise InspectError("name two run directories or more to compare")
    none = Chosen(steps=())
    data: Data = {"/api/runs": {"root": "", "runs": [], "skipped": []}}
    for run in runs:
        found, _ = run_data(run, none)
        listed = found.pop("/api/runs")
        data["/api/runs"]["runs"] += listed["runs"]
        data["/api/runs"]["skipped"] += listed["skipped"]
        data |= found
    names = ",".join(encoded(run.name) for run in runs)
    data[f"/api/compare?runs={names}"] = compare_runs(runs)
    data["export"] = {
        "kind": "compare",
        "start": f"#/compare/{names}",
        "running": False,
        "note": "Episodes are not in this file.",
    }
    return single_page(short(data), title=" and ".join(run.name for run in runs))


def open_run(path: Path) -> Run:
    """The run of a directory.

    Raises:
        InspectError: it is none.
    """
    if not (path / "config.yaml").is_file():
        raise InspectError(
            f"{path} is not a run directory: it has no config.yaml; give a folder of runs/"
        )
    path = path.resolve()
    return Run(path, printable(path.name))


def run_data(run: Run, chosen: Chosen, *, running: bool | None = None) -> tuple[Data, str]:
    """(the answers about a run by their url, a note about what is left out)."""
    base = f"/api/run/{encoded(run.name)}"
    places = _places(run, chosen)
    data: Data = {}
    steps: dict[str, list[int]] = {"step": [], "eval": []}
    errors: Counter[str] = Counter()
    for split, step in places:
        said = Skips()
        rows = _read(run, split, step, said)
        errors.update(f"{row.status}: {row.error[:200]}" for row in rows if row.error)
        wanted = _wanted(rows, run, split, step, chosen)
        if wanted:
            steps[split].append(step)
            data |= _step_data(run, base, split, step, wanted, skipped=said.words())
    metrics, thinned = _metrics(run)
    skips = Skips()
    row = run_row(run, skips, until=math.inf, running=running)
    about = run_json(run, running=running, errors=lambda: errors.most_common(3))
    known = sum(map(len, about["steps"].values()))
    data |= {
        "/api/runs": {
            "root": "",
            "runs": [row],
            "skipped": [{"name": run.name, "reason": words} for words in skips.words()],
        },
        base: about | {"steps": steps},
        f"{base}/metrics": metrics,
    }
    inside = len(places)
    note = thinned
    if inside < known:
        note += (
            f"Episodes of {inside} of {known} stored steps are in this file. "
            "`turnwise report RUN --step N` puts in others; `turnwise inspect` shows all."
        )
    return data, note


def encoded(name: str) -> str:
    """The name as encodeURIComponent writes it.

    Example:
        >>> encoded("a b,c/ü!")
        'a%20b%2Cc%2F%C3%BC!'
    """
    return quote(name, safe="-_.!~*'()")


def short(value: Any) -> Any:
    """The value with numbers of six digits, as many as a curve or a colour can show, and none that
    JSON does not have.

    Example:
        >>> short({"a": [0.12345678, float("nan"), 3]})
        {'a': [0.123457, None, 3]}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: short(one) for key, one in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [short(one) for one in cast(list[Any], value)]
    return value


def evenly(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, the first and the last among them.

    Example:
        >>> evenly([1, 2, 3, 4, 5], 3), evenly([7], 3), evenly([1, 2], 0)
        ([1, 3, 5], [7], [])
    """
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-most:]) if most else []
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _places(run: Run, chosen: Chosen) -> list[Place]:
    if chosen.one is not None:
        return [chosen.one[:2]]
    if chosen.steps is not None:
        return [("step", step) for step in chosen.steps]
    stored = run.folder.step_files("episodes")
    trained = [file.step for file in stored if file.split == "step"]
    # A step in which nothing had an advantage has an empty file of credit.
    credit = {file.step for file in run.folder.step_files("credit") if file.size}
    known = [step for step in trained if step in credit] or trained
    played = [file.step for file in stored if file.split == "eval"]
    return [("step", step) for step in evenly(known, chosen.most)] + [
        ("eval", step) for step in played[-1:]
    ]


def _read(run: Run, split: str, step: int, skips: Skips) -> list[EpisodeRow]:
    try:
        rows = [row for row, _ in read_rows(run.folder, split, step, skips)]
    except OSError:
        return []
    played = [row for row in rows if not Status(row.status).failed]
    known = judged([(row.env, row.success) for row in played])
    success = {row.row: won for row, won in zip(played, known, strict=True)}
    return [row._replace(success=success.get(row.row, row.success)) for row in rows]


def _wanted(
    rows: Sequence[EpisodeRow], run: Run, split: str, step: int, chosen: Chosen
) -> list[EpisodeRow]:
    if chosen.one is not None:
        found = [row for row in rows if row.row == chosen.one[2]]
        if not found:
            name = step_name("episodes", split, step)
            raise InspectError(f"{run.name}/{name} has no episode {chosen.one[2]}")
        return found
    ranked = sorted(rows, key=lambda row: (-(row.reward or 0.0), row.row))
    return sorted(evenly(ranked, chosen.episodes))


def _step_data(
    run: Run,
    base: str,
    split: str,
    step: int,
    rows: Sequence[EpisodeRow],
    *,
    skipped: Sequence[str],
) -> Data:
    place = f"split={split}&step={step}"
    shown = [row.to_json(split, step) for row in rows]
    data: Data = {}
    for row in list(rows):
        try:
            whole = whole_episode(run, split, step, row.row, row.start, siblings=shown)
        except InspectError:  # its line is no whole episode: the list leaves it out too
            shown = [one for one in shown if one["row"] != row.row]
            continue
        data[f"{base}/episode?{place}&row={row.row}"] = whole
    counts = {name: dict(Counter(one[name] for one in shown)) for name in ("status", "env")}
    return data | {
        f"{base}/episodes?{place}": {
            "total": len(shown),
            "episodes": shown,
            "statuses": counts["status"],
            "envs": counts["env"],
            "skipped": list(skipped),
        },
        f"{base}/groups?{place}": {"groups": groups_json(shown), "skipped": list(skipped)},
        f"{base}/gantt?{place}": gantt_json(run, split, step, shown),
    }


def _metrics(run: Run) -> tuple[dict[str, Json], str]:
    """(the answer of metrics with all rows, a note where they were thinned out)."""
    skips = Skips()
    rows = read_all(run.folder, "metrics.jsonl", skips)
    times = read_all(run.folder, "timings.jsonl", skips)
    kept = [*thin(rows)]
    note = ""
    if len(kept) < len(rows):
        note = f"Curves show {len(kept)} of {len(rows)} rows. "
    answer = {
        "rows": kept,
        "position": "",
        "reset": False,
        "timings": thin(times),
        "timings_position": "",
        "timings_reset": False,
        "more": False,
        "skipped": skips.words(),
    }
    return answer, note


def thin(rows: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """At most MOST_ROWS rows of training, evenly, and as many of evaluations.

    Example:
        >>> found = thin([{"step": step, "rollout/reward": 0.0} for step in range(5000)])
        >>> len(found), found[0]["step"], found[-1]["step"]
        (1000, 0, 4999)
    """
    played = [at for at, row in enumerate(rows) if "eval/reward" in row]
    other = [at for at, row in enumerate(rows) if "eval/reward" not in row]
    return [rows[at] for at in sorted((*evenly(played, MOST_ROWS), *evenly(other, MOST_ROWS)))]
