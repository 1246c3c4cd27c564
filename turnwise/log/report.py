"""report.html: a run in one file that needs no network. Curves, settings, and episodes coloured by advantage.

Everything that came from a model, an environment or a config is escaped: model text is hostile. The page has no script,
and its content-security policy forbids any.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from turnwise.log.events import Evaluated
from turnwise.log.records import CreditRow
from turnwise.log.store import RunReader
from turnwise.types import Episode, Json, Turn

FIRST_CURVES = (
    "eval/success",
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
)
"""Shown first and open; the rest follows folded."""
MAX_TEXT = 20_000
"""Characters shown of one message."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #eee; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font: 13px ui-monospace, monospace; }
svg { width: 100%; height: auto; background: #fafafa; }
.episode { border: 1px solid #ddd; border-radius: 6px; padding: .6em 1em; margin: 1em 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4em 0; padding: .4em .6em; border-left: 3px solid #bbb; }
pre.said { border-color: #36c; } pre.env { color: #555; background: #fafafa; }
.facts { color: #666; font-size: 13px; } .warn { background: #fff3cd; padding: .4em .8em; border-radius: 4px; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd; } svg, pre.env { background: #1e2126; } .warn { color: #222; }
  pre.env { color: #aaa; } td, th, h2, .episode { border-color: #333; }
}
"""


def write_report(run: RunReader | str | Path, *, episodes: int = 6) -> Path:
    """The path of the report, written into the run directory."""
    reader = run if isinstance(run, RunReader) else RunReader(run)
    path = reader.path / "report.html"
    beside = path.with_suffix(".tmp")
    beside.write_text(render_report(reader, episodes=episodes), encoding="utf-8")
    beside.replace(path)
    return path


def render_report(run: RunReader, *, episodes: int = 6) -> str:
    """The whole page."""
    title = escape(run.path.name)
    sections = [
        _outcome(run.summary()),
        _warnings(run.events()),
        _curves(run.metrics()),
        _episodes(run, count=episodes),
        _fidelity(run),
        f"<h2>Config</h2><details><summary>config.yaml</summary><pre>"
        f"{escape((run.path / 'config.yaml').read_text(encoding='utf-8'))}</pre></details>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{''.join(sections)}</body></html>\n"
    )


def _outcome(summary: Mapping[str, Json]) -> str:
    stored = [*(summary[label] for label in ("before", "after") if summary.get(label)), *summary.get("baselines", [])]
    found = [Evaluated.from_json(one) for one in stored]
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one.player if one.label == 'baseline' else one.label)}</td>"
        f"<td>{_interval(one.success, percent=True)}</td><td>{_interval(one.reward)}</td><td>{one.episodes}</td></tr>"
        for one in found
    )
    head = "<tr><th></th><th>success</th><th>reward</th><th>episodes</th></tr>"
    return f"<h2>Held-out tasks (95 % intervals)</h2><table>{head}{rows}</table>"


def _interval(values: Sequence[float | None] | None, *, percent: bool = False) -> str:
    if values is None:
        return "-"
    low, middle, high = (
        "?" if value is None else f"{100 * value:.1f} %" if percent else f"{value:.3f}" for value in values
    )
    return f"{middle} [{low}, {high}]"


def _warnings(events: Sequence[Mapping[str, Json]]) -> str:
    """What the run noted; of several notes of a kind, the last and their number."""
    lines: list[str] = []
    for kind in dict.fromkeys(str(event["kind"]) for event in events):
        same = [event for event in events if event["kind"] == kind]
        times = f" ({len(same)} times, last)" if len(same) > 1 else ""
        lines.append(f'<p class="warn">{escape(kind)}{times}: {escape(str(same[-1]["message"]))}</p>')
    return f"<h2>What happened</h2>{''.join(lines)}" if lines else ""


def _curves(rows: Sequence[Mapping[str, float | None]]) -> str:
    names = sorted({name for row in rows for name in row if name != "step"})
    first = [name for name in FIRST_CURVES if name in names]
    rest = [name for name in names if name not in first]

    def figures(chosen: Iterable[str]) -> str:
        return "".join(_figure(name, [(row["step"] or 0, row.get(name)) for row in rows]) for name in chosen)

    more = f'<details><summary>{len(rest)} more</summary><div class="curves">{figures(rest)}</div></details>'
    return f'<h2>Curves</h2><div class="curves">{figures(first)}</div>{more if rest else ""}' if names else ""


def _figure(name: str, points: Iterable[tuple[float, float | None]]) -> str:
    """One curve as inline SVG. A gap is where the value was missing or not finite."""
    points = list(points)
    known = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    if not known:
        return ""
    width, height, left, bottom = 320, 150, 50, 18
    low, high = min(value for _, value in known), max(value for _, value in known)
    start, end = points[0][0], points[-1][0]
    margin = (high - low) * 0.05 or max(abs(high) * 0.05, 1e-9)
    low, high = low - margin, high + margin

    def place(step: float, value: float) -> str:
        x = left + (step - start) / ((end - start) or 1) * (width - left - 6)
        y = 6 + (high - value) / (high - low) * (height - bottom - 6)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in known)
    shape = f'<polyline points="{line}" fill="none" stroke="#36c" stroke-width="1.5"/>'
    if len(known) < 40:
        dots = (place(step, value).split(",") for step, value in known)
        shape += "".join(f'<circle cx="{x}" cy="{y}" r="2" fill="#36c"/>' for x, y in dots)
    labels = (
        (4, 14, f"{high - margin:.3g}"),
        (4, height - bottom, f"{low + margin:.3g}"),
        (left, height - 4, f"step {start:g}"),
        (width - 40, height - 4, f"{end:g}"),
    )
    texts = "".join(f'<text x="{x}" y="{y}" font-size="10" fill="#888">{text}</text>' for x, y, text in labels)
    caption = f"<figcaption>{escape(name)} = {known[-1][1]:.4g}</figcaption>"
    return (
        f'<figure>{caption}<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">{texts}{shape}'
        f"</svg></figure>"
    )


def _episodes(run: RunReader, *, count: int) -> str:
    stored = {*run.steps()}
    # A step in which nothing had an advantage has an empty file.
    steps = [step for step in run.steps("credit") if step in stored and run.size("credit", step)]
    if not steps:
        return ""
    pieces = run.pieces()
    chosen = steps if len(steps) == 1 else [steps[0], steps[-1]]
    parts: list[str] = []
    for step in chosen:
        credit: dict[str, list[CreditRow]] = {}
        for row in run.credit(step):
            credit.setdefault(row.episode_id, []).append(row)
        known = [episode for episode in run.episodes(step) if episode.id in credit]
        parts.append(f"<h3>Step {step}</h3>")
        for episode in _spread(known, max(1, count // len(chosen))):
            parts.append(_episode(episode, credit[episode.id], pieces))
    legend = (
        f"<p>Tokens are coloured by advantage: {_token('better than expected', 1.0, 1.0)}, "
        f"{_token('worse', -1.0, 1.0)}. The strongest colour is the episode's largest advantage.</p>"
    )
    return f"<h2>Episodes</h2>{legend}{''.join(parts)}"


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
    opening = "".join(f'<pre class="env">{_text(message.content)}</pre>' for message in episode.prompt)
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
    words = "every one of them a token that was sampled" if not broken else f"{broken} samples BROKEN"
    return f"<h2>Token fidelity</h2><p>{tokens} tokens trained on in {len(ledger)} steps, {words}.</p>"


def summary_json(before: Evaluated | None, after: Evaluated | None, **facts: Json) -> dict[str, Json]:
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
