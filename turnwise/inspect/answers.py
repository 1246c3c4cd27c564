"""The answers of the server, from the runs' files. The export asks the same functions."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from turnwise.inspect.compare import compare_runs
from turnwise.inspect.episode import episode_json, read_at, read_pieces, read_stored
from turnwise.inspect.episode_rows import number
from turnwise.inspect.folder import InspectError, Skips, step_name
from turnwise.inspect.follow import read_news
from turnwise.inspect.gantt import gantt_json
from turnwise.inspect.index import SORTS, Filter
from turnwise.inspect.overview import examine, list_runs, run_json
from turnwise.inspect.runs import Run, Runs
from turnwise.types import Json, Status

Query = Mapping[str, str]
MAX_PAGE = 1000


class Answers:
    """Answers questions about runs.

    Args:
        roots: run directories, or folders of them.
    """

    def __init__(self, roots: Sequence[Path], *, cache: Path | None = None) -> None:
        self.found = Runs(roots, cache=cache)
        self.background = Background()

    def close(self) -> None:
        self.background.close()

    def runs(self) -> dict[str, Json]:
        """/api/runs."""
        answer = list_runs(self.found)
        for run in self.found.scan()[0]:
            if not run.examined:
                self.background.ask(f"doctor {run.name}", lambda run=run: _examined(run))
        return answer

    def run(self, name: str) -> dict[str, Json]:
        """/api/run/RUN. Indexing of its episodes begins."""
        run = self.found.find(name)
        self._index(run)
        return run_json(run)

    def metrics(self, name: str, query: Query) -> dict[str, Json]:
        """/api/run/RUN/metrics."""
        run = self.found.find(name)
        return metrics_json(run, query.get("after", ""), query.get("timings_after", ""))

    def episodes(self, name: str, query: Query) -> dict[str, Json]:
        """/api/run/RUN/episodes. The file of a single step is indexed at once; of all steps, what
        is indexed so far."""
        run, wanted = self.found.find(name), read_filter(query)
        if wanted.step is None:
            self._index(run)
        else:
            run.index.fresh(wanted.split, wanted.step)
        # First: files that are indexed while the search runs are not in its answer, and the page
        # asks again as long as some are missing.
        done, files = run.index.progress()
        total, rows = run.index.search(wanted)
        counts = {
            column: run.index.counts(column, split=wanted.split, step=wanted.step)
            for column in ("status", "env")
        }
        return {
            "total": total,
            "episodes": rows,
            "statuses": counts["status"],
            "envs": counts["env"],
            "indexed": {"files": done, "of": files},
            "skipped": run.index.skipped(wanted.split, wanted.step).words(),
        }

    def groups(self, name: str, query: Query) -> dict[str, Json]:
        """/api/run/RUN/groups."""
        run = self.found.find(name)
        split, step = read_place(query)
        run.index.fresh(split, step)
        return {
            "groups": groups_json(run.index.rows(split, step)),
            "skipped": run.index.skipped(split, step).words(),
        }

    def episode(self, name: str, query: Query) -> dict[str, Json]:
        """/api/run/RUN/episode."""
        run = self.found.find(name)
        split, step = read_place(query)
        row = read_whole(query, "row")
        run.index.fresh(split, step)
        start = run.index.start(split, step, row)
        if start is None:
            raise InspectError(f"{step_name('episodes', split, step)} has no episode {row}")
        rows = run.index.rows(split, step)
        return whole_episode(run, split, step, row, start, siblings=rows)

    def gantt(self, name: str, query: Query) -> dict[str, Json]:
        """/api/run/RUN/gantt."""
        run = self.found.find(name)
        split, step = read_place(query)
        run.index.fresh(split, step)
        return gantt_json(run, split, step, run.index.rows(split, step))

    def compare(self, names: Sequence[str]) -> dict[str, Json]:
        """/api/compare."""
        if len(names) < 2:
            raise InspectError("name two runs or more to compare", status=400)
        return compare_runs([self.found.find(name) for name in names])

    def _index(self, run: Run) -> None:
        def work() -> bool:
            stale = run.index.stale()
            if stale:
                run.index.add(stale[0])
            return len(stale) > 1

        self.background.ask(f"index {run.name}", work)


class Background:
    """A thread that does one piece of work after the other. Work that returns True has more to do
    and comes again after the others."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[str, Callable[[], bool]]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, name: str, work: Callable[[], bool]) -> None:
        """Puts work at the end, unless work of this name waits already."""
        with self._wake:
            if self._closed or any(known == name for known, _ in self._jobs):
                return
            self._jobs.append((name, work))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="turnwise-inspect-index", daemon=True
                )
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._jobs.clear()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                name, work = self._jobs.popleft()
            if _done(name, work):
                self.ask(name, work)


def read_filter(query: Query) -> Filter:
    """The filter of a request for episodes.

    Raises:
        InspectError: a value is not what its name asks for.
    """
    split = _split(query)
    asked = query.get("step", "all")
    sort = query.get("sort") or "order"
    if sort.removeprefix("-") not in SORTS:
        raise InspectError(f"sort is one of {', '.join(SORTS)}, got {sort[:40]!r}", status=400)
    status, success = query.get("status") or None, query.get("success") or None
    if status is not None and status not in {one.value for one in Status}:
        raise InspectError(f"no episode has the status {status[:40]!r}", status=400)
    if success not in (None, "yes", "no"):
        raise InspectError(f"success is yes or no, got {success[:40]!r}", status=400)
    return Filter(
        split=split,
        step=None if asked in ("all", "") else read_whole(query, "step"),
        status=status,
        env=query.get("env") or None,
        success=None if success is None else success == "yes",
        min_reward=_float(query, "min_reward"),
        max_reward=_float(query, "max_reward"),
        text=query.get("text", "")[:500],
        sort=sort,
        offset=read_whole(query, "offset", default=0),
        limit=min(read_whole(query, "limit", default=100), MAX_PAGE),
    )


def read_place(query: Query) -> tuple[str, int]:
    """(split, step) of a request.

    Raises:
        InspectError: one is missing, or another than there can be.
    """
    return _split(query), read_whole(query, "step")


def read_whole(query: Query, name: str, *, default: int | None = None) -> int:
    """A whole number of a request."""
    text = query.get(name) or ""
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InspectError(f"{name} is a whole number, got {text[:40]!r}", status=400)
    return int(text)


def metrics_json(run: Run, after: str = "", timings_after: str = "") -> dict[str, Json]:
    """New rows of metrics.jsonl and timings.jsonl."""
    skips = Skips()
    news = read_news(run.folder, "metrics.jsonl", after, skips)
    times = read_news(run.folder, "timings.jsonl", timings_after, skips)
    return {
        "rows": news.rows,
        "position": news.position,
        "reset": news.reset,
        "timings": times.rows,
        "timings_position": times.position,
        "timings_reset": times.reset,
        "more": news.more or times.more,
        "skipped": skips.words(),
    }


def groups_json(rows: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Episodes that share a task, with the spread of their rewards.

    Example:
        >>> row = {"group": 0, "task": "t", "env": "e", "success": True}
        >>> group, = groups_json([row | {"row": 0, "reward": 1.0}, row | {"row": 1, "reward": 0.0}])
        >>> group["episodes"], group["reward_mean"], group["reward_std"], group["success"]
        ([0, 1], 0.5, 0.5, 1.0)
    """
    members: dict[tuple[Json, Json], list[Mapping[str, Json]]] = {}
    for row in rows:
        members.setdefault((row["env"], row["group"]), []).append(row)
    found: list[dict[str, Json]] = []
    for (env, group), same in members.items():
        rewards = [row["reward"] for row in same if row["reward"] is not None]
        judged = [row["success"] for row in same if row["success"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        spread = None
        if mean is not None:
            spread = (sum((one - mean) ** 2 for one in rewards) / len(rewards)) ** 0.5
        found.append(
            {
                "group": group,
                "task": same[0]["task"],
                "env": env,
                "episodes": [row["row"] for row in same],
                "reward_mean": number(mean),
                "reward_std": number(spread),
                "success": sum(judged) / len(judged) if judged else None,
            }
        )
    return found


def whole_episode(
    run: Run,
    split: str,
    step: int,
    row: int,
    start: int,
    *,
    siblings: Sequence[Mapping[str, Json]],
) -> dict[str, Json]:
    """An episode with all that is stored about it.

    Args:
        start: where its line starts in the file.
        siblings: rows of its step, of which those of its group are shown.
    """
    skips = Skips()
    episode = read_at(run.folder, split, step, row, start)
    stored = read_stored(run.folder, split, step, episode, read_pieces(run.folder, skips), skips)
    same = [
        {"row": one["row"], "reward": one["reward"], "success": one["success"]}
        for one in siblings
        if (one["group"], one["env"]) == (episode.group_id, episode.tag)
    ]
    answer = episode_json(episode, stored, siblings=same, skips=skips)
    # The list counts an episode that heard nothing of success as failed where others heard.
    own = next((one for one in same if one["row"] == row), answer)
    answer["success"] = own["success"]
    return {**answer, "split": split, "step": step, "row": row, "skipped": skips.words()}


def _examined(run: Run) -> bool:
    examine(run, Skips(), run.index.errors)
    return False


def _done(name: str, work: Callable[[], bool]) -> bool:
    import logging
    import sqlite3

    try:
        return work()
    except (OSError, sqlite3.Error) as error:  # a full disk, a run that is deleted meanwhile
        logging.getLogger(__name__).warning("%s: %s: %s", name, type(error).__name__, error)
        return False


def _split(query: Query) -> str:
    split = query.get("split") or "step"
    if split not in ("step", "eval"):
        raise InspectError(f"split is step or eval, got {split[:40]!r}", status=400)
    return split


def _float(query: Query, name: str) -> float | None:
    text = query.get(name) or ""
    if not text:
        return None
    try:
        value = number(float(text))
    except ValueError:
        value = None
    if value is None:
        raise InspectError(f"{name} is a number, got {text[:40]!r}", status=400)
    return value
