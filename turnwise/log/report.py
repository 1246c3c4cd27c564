"""report.html: a run in one self-contained file: outcome, findings of the doctor, curves, settings,
and episodes coloured by advantage.

All text from models, environments and configs is untrusted and escaped. The page has no script, and
its content-security policy forbids any.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from turnwise.log.doctor import diagnose, read_chart
from turnwise.log.events import Evaluated, Event, RunEnded, RunStarted, StepDone
from turnwise.log.figures import Curve, figure_of
from turnwise.log.records import CreditRow
from turnwise.log.store import RunReader
from turnwise.types import Episode, Json, Turn

logger = logging.getLogger(__name__)
FIRST_CURVES = (
    "eval/success",
    "eval/reward",
    "rollout/success",
    "rollout/reward",
    "rollout/reward_std",
    "rollout/zero_variance_groups",
    "rollout/format_valid",
    "rollout/reply_tokens",
    "rollout/distinct_replies",
    "train/policy_loss",
    "train/value_loss",
    "train/entropy",
    "train/approx_kl",
    "critic/explained_variance",
    "train/gap_mean",
    "sft/held_out_loss",
    "sft/token_accuracy",
    "sft/loss",
)
"""Shown first and open; the rest follows folded."""
MOST_STEPS = 8
"""Steps whose episodes are shown where none are asked for."""
MAX_TEXT = 20_000
"""Characters shown of one message."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; }
body { max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; }
td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #eee; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font: 13px ui-monospace, monospace; }
svg { width: 100%; height: auto; background: #fafafa; }
.episode { border: 1px solid #ddd; border-radius: 6px; padding: .6em 1em; margin: 1em 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { margin: .4em 0; padding: .4em .6em; border-left: 3px solid #bbb; }
pre.said { border-color: #36c; } pre.env { color: #555; background: #fafafa; }
.facts { color: #666; font-size: 13px; }
.warn { background: #fff3cd; padding: .4em .8em; border-radius: 4px; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd; }
  svg, pre.env { background: #1e2126; }
  .warn { color: #222; }
  pre.env { color: #aaa; } td, th, h2, .episode { border-color: #333; }
}
"""


def write_report(
    run: RunReader | str | Path,
    *,
    episodes: int = 6,
    steps: Sequence[int] | None = None,
    running: bool = False,
) -> Path:
    """The path of the report, written into the run directory.

    Args:
        episodes: how many episodes of a step are shown.
        steps: the steps whose episodes are shown. None: some from the first to the last.
        running: the run goes on, so that what is still missing is no finding.
    """
    reader = run if isinstance(run, RunReader) else RunReader(run)
    path = reader.path / "report.html"
    beside = path.with_suffix(".tmp")
    page = render_report(reader, episodes=episodes, steps=steps, running=running)
    beside.write_text(page, encoding="utf-8")
    beside.replace(path)
    return path


class ReportSink:
    """Rewrites the report while a run goes on and when it ends, however it ends.

    It takes a share of the run's time that nobody notices: at most every `seconds`, and never more
    often than fifty times what the last one took.
    """

    def __init__(self, *, seconds: float = 20.0) -> None:
        self._seconds = seconds
        self._path: Path | None = None
        self._next = 0.0

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._path = event.path
                self._next = time.monotonic() + self._seconds
            case StepDone() if time.monotonic() >= self._next:
                self._write(running=True)
            case RunEnded():
                self._write(running=False)
            case _:
                pass

    def close(self) -> None:
        """Nothing to release."""

    def _write(self, *, running: bool) -> None:
        if self._path is None:
            return
        started = time.monotonic()
        try:
            write_report(self._path, running=running)
        except Exception as error:  # a page must not end a run of hours
            logger.warning("the report could not be written: %s: %s", type(error).__name__, error)
        now = time.monotonic()
        self._next = now + max(self._seconds, 50.0 * (now - started))


def render_report(
    run: RunReader, *, episodes: int = 6, steps: Sequence[int] | None = None, running: bool = False
) -> str:
    """The whole page."""
    config = (run.path / "config.yaml").read_text(encoding="utf-8", errors="replace")
    rows = run.metrics()
    sections = [
        _progress(run, rows, running=running),
        _outcome(run.summary() or stored_outcome(rows)),
        _findings(run, running=running),
        _warnings(run.events()),
        _curves(rows),
        _episodes(run, count=episodes, steps=steps, most=2 if running else MOST_STEPS),
        _fidelity(run),
        f"<h2>Config</h2><details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>",
    ]
    return page(run.path.name, "".join(sections))


def page(title: str, body: str) -> str:
    """A whole page without scripts. The title is escaped; the body has to be."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    title = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1>{body}</body></html>\n"
    )


def _progress(run: RunReader, rows: Sequence[Mapping[str, float | None]], *, running: bool) -> str:
    steps = run.config.train.steps
    total = steps or max((int(row.get("sft/steps") or 0) for row in rows), default=0)
    word = "The run goes on; this page is rewritten while it does." if running else ""
    return f"<p>{steps_done(rows)} of {total} steps. {word}</p>"


def steps_done(rows: Sequence[Mapping[str, float | None]]) -> int:
    """Steps of training, or of imitation, that these metrics tell of."""
    done = [int(row["step"] or 0) for row in rows if "rollout/reward" in row or "sft/loss" in row]
    return max(done, default=0)


def stored_outcome(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Json]:
    """The outcome so far, from the metrics: a run that goes on has no summary."""
    played = [row for row in rows if row.get("eval/reward") is not None]
    found: dict[str, Json] = {}
    for label, row in zip(("before", "after"), played[:1] + played[1:][-1:], strict=False):
        share = [row.get(f"eval/success{end}") for end in ("_low", "", "_high")]
        found[label] = {
            "step": row["step"],
            "label": label if label == "before" else "during",
            "episodes": int(row.get("eval/episodes") or 0),
            "success": None if None in share else share,
            "reward": [row.get(f"eval/reward{end}") for end in ("_low", "", "_high")],
        }
    return found


def _baselines(rows: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Reference lines by curve: what players reach who learn nothing, and the expert."""
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        for name, value in row.items():
            if not name.startswith("baseline/") or value is None:
                continue
            player, _, what = name.removeprefix("baseline/").rpartition("_")
            for curve in (f"eval/{what}", f"rollout/{what}"):
                lines.setdefault(curve, {})[player] = value
    return lines


def _findings(run: RunReader, *, running: bool) -> str:
    """What `turnwise doctor` says. Notes of the run itself have a section of their own."""
    kinds = {str(event["kind"]) for event in run.events()}
    found = [one for one in diagnose(read_chart(run)) if one.name not in kinds]
    if running:
        found = [one for one in found if one.name not in ("unfinished", "no_improvement")]
    if not found:
        return "<h2>Doctor</h2><p>Nothing to look at.</p>"
    lines = "".join(
        f'<p class="warn"><b>{escape(one.severity)} {escape(one.name)}</b>: '
        f"{escape(one.evidence)}<br>{escape(one.advice)}</p>"
        for one in found
    )
    return f"<h2>Doctor</h2>{lines}"


def _outcome(summary: Mapping[str, Json]) -> str:
    stored = [
        *(summary[label] for label in ("before", "after") if summary.get(label)),
        *summary.get("baselines", []),
    ]
    found = [Evaluated.from_json(one) for one in stored]
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one.player if one.label == 'baseline' else one.label)}</td>"
        f"<td>{_interval(one.success, percent=True)}</td>"
        f"<td>{_interval(one.reward)}</td><td>{one.episodes}</td></tr>"
        for one in found
    )
    head = "<tr><th></th><th>success</th><th>reward</th><th>episodes</th></tr>"
    return f"<h2>Held-out tasks (95 % intervals)</h2><table>{head}{rows}</table>"


def _interval(values: Sequence[float | None] | None, *, percent: bool = False) -> str:
    if values is None:
        return "-"
    low, middle, high = (
        "?" if value is None else f"{100 * value:.1f} %" if percent else f"{value:.3f}"
        for value in values
    )
    return f"{middle} [{low}, {high}]"


def _warnings(events: Sequence[Mapping[str, Json]]) -> str:
    """The run's notices; for several of a kind, the last one and their number."""
    lines: list[str] = []
    for kind in dict.fromkeys(str(event["kind"]) for event in events):
        same = [event for event in events if event["kind"] == kind]
        times = f" ({len(same)} times, last)" if len(same) > 1 else ""
        lines.append(
            f'<p class="warn">{escape(kind)}{times}: {escape(str(same[-1]["message"]))}</p>'
        )
    return f"<h2>What happened</h2>{''.join(lines)}" if lines else ""


def _curves(rows: Sequence[Mapping[str, float | None]]) -> str:
    names = sorted({name for row in rows for name in row if name != "step"})
    first = [name for name in FIRST_CURVES if name in names]
    bounds = tuple(f"{name}{end}" for name in names for end in ("_low", "_high"))
    rest = [name for name in names if name not in first and name not in bounds]
    rest = [name for name in rest if not name.startswith("baseline/")]
    lines = _baselines(rows)

    def drawn(name: str) -> str:
        points = [(row["step"] or 0.0, row.get(name)) for row in rows]
        band = [
            (row["step"] or 0.0, low, high)
            for row in rows
            if (low := row.get(f"{name}_low")) is not None
            and (high := row.get(f"{name}_high")) is not None
        ]
        return figure_of(name, [Curve(points=points, band=band)], lines=lines.get(name))

    def figures(chosen: Iterable[str]) -> str:
        return "".join(drawn(name) for name in chosen)

    more = (
        f"<details><summary>{len(rest)} more</summary>"
        f'<div class="curves">{figures(rest)}</div></details>'
    )
    return (
        f'<h2>Curves</h2><div class="curves">{figures(first)}</div>{more if rest else ""}'
        if names
        else ""
    )


def _episodes(run: RunReader, *, count: int, steps: Sequence[int] | None, most: int) -> str:
    stored = {*run.steps()}
    # A step in which nothing had an advantage has an empty file.
    known = [step for step in run.steps("credit") if step in stored and run.size("credit", step)]
    chosen = _evenly(known, most) if steps is None else [step for step in steps if step in known]
    if not chosen:
        return ""
    pieces = run.pieces()
    parts: list[str] = []
    for step in chosen:
        credit: dict[str, list[CreditRow]] = {}
        for row in run.credit(step):
            credit.setdefault(row.episode_id, []).append(row)
        played = [episode for episode in run.episodes(step) if episode.id in credit]
        shown = "".join(
            _episode(episode, credit[episode.id], pieces) for episode in _spread(played, count)
        )
        opened = " open" if step in (chosen[0], chosen[-1]) else ""
        parts.append(f"<details{opened}><summary>Step {step}</summary>{shown}</details>")
    legend = (
        f"<p>Tokens are coloured by advantage: {_token('better than expected', 1.0, 1.0)}, "
        f"{_token('worse', -1.0, 1.0)}. The strongest colour is the episode's largest "
        "advantage.</p>"
    )
    others = (
        f"<p>{len(known)} steps are stored; those of another step: "
        f"<code>turnwise report {escape(str(run.path))} --step N</code></p>"
    )
    return f"<h2>Episodes</h2>{legend}{others}{''.join(parts)}"


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, the first and the last among them.

    Example:
        >>> _evenly([1, 2, 3, 4, 5], 3), _evenly([7], 3)
        ([1, 3, 5], [7])
    """
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _spread(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Episodes from the best to the worst, evenly."""
    ranked = sorted(episodes, key=lambda episode: (-episode.reward, episode.id))
    if len(ranked) <= count:
        return ranked
    return [ranked[round(index * (len(ranked) - 1) / max(count - 1, 1))] for index in range(count)]


def _episode(episode: Episode, rows: Sequence[CreditRow], pieces: Mapping[int, str]) -> str:
    by_turn: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.sample):
        for turn_id, advantage in zip(row.turn_ids, row.advantages, strict=True):
            by_turn.setdefault(turn_id, []).append(advantage)
    known = [abs(value) for values in by_turn.values() for value in values if math.isfinite(value)]
    scale = max(known, default=0.0)
    opening = "".join(
        f'<pre class="env">{_text(message.content)}</pre>' for message in episode.prompt
    )
    turns = "".join(
        f'<pre class="said">{_said(turn, by_turn.get(index, []), pieces, scale)}</pre>'
        f'<div class="facts">action {escape(repr(turn.action))}, reward {turn.reward:.3g}</div>'
        + "".join(f'<pre class="env">{_text(message.content)}</pre>' for message in turn.messages)
        for index, turn in enumerate(episode.turns)
    )
    facts = (
        f"{escape(episode.id)}: task {escape(episode.task.id)}, {escape(episode.status.value)}, "
        f"reward {episode.reward:.3g}, largest advantage {scale:.3g}"
    )
    return (
        f'<div class="episode"><div class="facts">{facts}</div>'
        f"<details><summary>opening messages</summary>{opening}</details>{turns}</div>"
    )


def _said(turn: Turn, advantages: Sequence[float], pieces: Mapping[int, str], scale: float) -> str:
    ids = turn.completion.ids
    if len(advantages) != len(ids) or any(token not in pieces for token in ids):
        mean = sum(advantages) / len(advantages) if advantages else 0.0
        return _token(turn.text[:MAX_TEXT], mean, scale)
    pairs = zip(ids, advantages, strict=True)
    return "".join(_token(pieces[token], advantage, scale) for token, advantage in pairs)


def _token(text: str, advantage: float, scale: float) -> str:
    """The text on green where the advantage is positive, on red where it is negative."""
    strength = min(abs(advantage) / scale, 1.0) if scale and math.isfinite(advantage) else 0.0
    colour = "46, 160, 67" if advantage > 0 else "218, 54, 51"
    style = f"background: rgba({colour}, {0.65 * strength:.2f})"
    return f'<span style="{style}" title="{advantage:.4g}">{escape(text)}</span>'


def _text(text: str) -> str:
    cut = f"\n... {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else ""
    return escape(text[:MAX_TEXT]) + cut


def _fidelity(run: RunReader) -> str:
    ledger = run.ledger()
    if not ledger:
        return ""
    tokens, broken = sum(entry.trained for entry in ledger), sum(entry.broken for entry in ledger)
    words = (
        "every one of them a token that was sampled" if not broken else f"{broken} samples BROKEN"
    )
    return (
        f"<h2>Token fidelity</h2><p>{tokens} tokens trained on in {len(ledger)} steps, {words}.</p>"
    )


def summary_json(
    before: Evaluated | None, after: Evaluated | None, **facts: Json
) -> dict[str, Json]:
    """What summary.json holds.

    Example:
        >>> summary_json(None, None, seconds=3)
        {'before': None, 'after': None, 'seconds': 3}
    """
    return {
        "before": None if before is None else before.to_json(),
        "after": None if after is None else after.to_json(),
        **facts,
    }
