"""The dashboard: a view of a run as lines of exactly the terminal's width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from turnwise.log.doctor import Diagnosis
from turnwise.log.terminal.glyphs import Glyphs
from turnwise.log.terminal.playback import Scene
from turnwise.log.terminal.plot import COLOURS, Plot, draw_plot
from turnwise.log.terminal.text import fit, one_line, wrapped
from turnwise.log.terminal.view import RunView
from turnwise.log.words import duration

SHOWN = ("success", "reward")
CURVE_STYLES = {"success": "bright_cyan", "reward": "bright_magenta"}
STATE_STYLES = {
    "running": "bold green",
    "done": "bold cyan",
    "stopped": "bold yellow",
    "interrupted": "bold yellow",
}
SEVERITY_STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}
SHARE_STYLES = ("cyan", "blue", "magenta", "dim")
MOST_FINDINGS = 6
MOST_ROWS = 24
"""Of the curves: higher ones say no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Everything that one drawing shows."""

    view: RunView
    scene: Scene | None
    findings: Sequence[Diagnosis]
    now: float
    """In seconds of the view's clock."""
    footer: str = ""
    """The keys, or what to do next."""


def draw(frame: Frame, *, width: int, height: int, glyphs: Glyphs, fill: bool = True) -> list[Text]:
    """The dashboard in at most `height` lines of exactly `width` cells.

    Args:
        fill: exactly `height` lines, so that the last ones stay where they are.
    """
    head = _head(frame, width, glyphs)
    facts = [*_held_out(frame.view, width, glyphs), *_time(frame.view, width, glyphs)]
    notes = _notes(frame, width, most=max(1, min(MOST_FINDINGS, (height - 16) // 4)))
    said = _said(frame, most=1 if height < 32 else 3)
    foot = [*said, *([Text(frame.footer, style="dim")] if frame.footer else [])]
    free = height - len(head) - len(facts) - len(notes) - len(foot)
    playing = 0
    if frame.scene is not None and free >= 9:
        playing = min(max(4, round(free * 0.45)), 2 + max(frame.scene.rows, 4))
    curves = _curves(frame.view, width, min(free - playing, MOST_ROWS), glyphs)
    episode = _episode(frame.scene, width, playing, glyphs) if playing else []
    lines = [*head, *curves, *facts, *episode, *notes]
    lines += [Text()] * (height - len(lines) - len(foot) if fill else 0)
    return [fit(line, width) for line in [*lines, *foot][:height]]


def _head(frame: Frame, width: int, glyphs: Glyphs) -> list[Text]:
    view = frame.view
    title = Text.assemble(("turnwise ", "dim"), (one_line(view.path.name), "bold"))
    state = Text(view.state, style=STATE_STYLES[view.state])
    steps = Text.assemble((f"step {view.done}", "bold"), (f" of {view.total}  ", "dim"), state)
    facts = f" {glyphs.between} ".join(one_line(fact, most=60) for fact in _facts(view))
    return [
        _apart(title, steps, width),
        Text(facts, style="dim"),
        _progress(frame, width, glyphs),
    ]


def _facts(view: RunView) -> list[str]:
    config = view.config
    names = list(dict.fromkeys(env.name for env in config.envs.values())) or [config.env.name]
    if config.data.prompts is not None:
        names = [config.data.prompts]
    turns = "many turns" if config.train.multi_turn else "one turn"
    backend = [] if config.backend == "native" else [config.backend]
    model = config.model.path or "embedded model"
    return [", ".join(names), config.algo.name, model, turns, *backend]


def _progress(frame: Frame, width: int, glyphs: Glyphs) -> Text:
    view = frame.view
    share = min(view.done / max(view.total, 1), 1.0)
    spent, left = view.elapsed(frame.now), view.left()
    words = [f"{share:4.0%}".replace("%", " %")]
    if spent is not None:
        words.append(duration(spent))
    if view.state == "running" and left is not None:
        words.append(f"{duration(left)} left")
    text = "  ".join(words)
    room = max(width - len(text) - 2, 10)
    full = round(share * room)
    return Text.assemble(
        (glyphs.full * full, "bold green" if view.state == "running" else "cyan"),
        (glyphs.empty * (room - full), "dim"),
        f"  {text}",
    )


def _curves(view: RunView, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Success and reward side by side; one alone has the whole width."""
    plots = [(what, plot_of(view, what)) for what in SHOWN]
    known = [(what, plot) for what, plot in plots if plot.points or plot.marks]
    if height < 4:
        return []
    if not known:
        waiting = "no step is done yet" if view.state == "running" else "no step was done"
        return [_rule("curves", width, glyphs), Text(f"  {waiting}", style="dim")]
    gap = 2
    each = (width - gap * (len(known) - 1)) // len(known)
    columns = [
        [
            fit(line, each)
            for line in (
                _rule(what, each, glyphs, value=_newest(view, what)),
                *draw_plot(plot, width=each, height=height - 1, glyphs=glyphs),
            )
        ]
        for what, plot in known
    ]
    return [Text(" " * gap).join(row) for row in zip(*columns, strict=True)]


def plot_of(view: RunView, what: str) -> Plot:
    """Success or reward by step, with evaluations and baselines."""
    return Plot(
        points=view.points(f"rollout/{what}"),
        marks=view.points(f"eval/{what}"),
        lines=view.baselines(what),
        percent=what == "success",
        style=CURVE_STYLES[what],
    )


def _newest(view: RunView, what: str) -> str:
    value = view.last(f"rollout/{what}")
    return "" if value is None else _written(value, what)


def _written(value: float, what: str) -> str:
    return f"{100 * value:.1f} %" if what == "success" else f"{value:.3f}"


def _held_out(view: RunView, width: int, glyphs: Glyphs) -> list[Text]:
    """Evaluations and baselines in a line, of success where there is one; shorter until it fits."""
    what = "success" if "eval/success" in view.curves else "reward"
    played, others = view.points(f"eval/{what}"), view.baselines(what)
    if not played and not others:
        return []
    lines: list[Text] = []
    for digits, interval, title in ((1, True, f"held-out {what}"), (0, True, "held out")):
        lines.append(Text.assemble((f"{title}  ", "dim")))
        lines[-1].append_text(_evaluated(view, what, glyphs, interval=interval))
        lines[-1].append_text(_players(others, what, digits=digits))
    short = Text.assemble(("held out  ", "dim"))
    short.append_text(_evaluated(view, what, glyphs, interval=False))
    lines += [short.copy().append_text(_players(others, what, digits=0)), short]
    return [next((line for line in lines if line.cell_len <= width), lines[-1])]


def _evaluated(view: RunView, what: str, glyphs: Glyphs, *, interval: bool) -> Text:
    """The first evaluation and the newest."""
    played = view.points(f"eval/{what}")
    line = Text().append(_written(played[0][1], what) if played else "", style="bold")
    if len(played) > 1:
        line.append(f" {glyphs.arrow} ", style="dim")
        line.append(_written(played[-1][1], what), style="bold")
        low, high = (view.last(f"eval/{what}_{end}") for end in ("low", "high"))
        if interval and low is not None and high is not None:
            bounds = (_written(bound, what).removesuffix(" %") for bound in (low, high))
            line.append(f" [{', '.join(bounds)}]", style="dim")
    return line


def _players(others: Mapping[str, float], what: str, *, digits: int) -> Text:
    line = Text()
    for name, value in others.items():
        shown = f"{100 * value:.{digits}f} %" if what == "success" else f"{value:.{digits + 1}f}"
        line.append("  ").append(f"{name} {shown}", style=COLOURS.get(name, "blue"))
    return line


def _time(view: RunView, width: int, glyphs: Glyphs) -> list[Text]:
    """Where the time goes, as a bar of shares."""
    shares = view.shares()
    if not shares:
        return []
    parts = list(zip(shares.items(), glyphs.fills, SHARE_STYLES, strict=True))
    line, bar = Text.assemble(("time  ", "dim")), Text()
    words: list[Text] = []
    for (part, share), fill, style in parts:
        words.append(Text.assemble((f"{fill} ", style), f"{part} {100 * share:.0f} %"))
    if (speed := view.last("time/generated_tokens_per_second")) is not None:
        words.append(Text(f"{speed:.0f} tokens/s", style="dim"))
    # Words make room for the bar.
    while len(words) > 3 and sum(word.cell_len + 2 for word in words) > width - 18:
        words.pop()
    room = min(width - 6 - sum(word.cell_len + 2 for word in words), 40)
    if room >= 8:
        end = 0.0
        for (_, share), fill, style in parts:
            end += share * room
            bar.append(fill * (round(end) - bar.cell_len), style=style)
        line.append_text(bar).append("  ")
    return [line.append_text(Text("  ").join(words))]


def _episode(scene: Scene | None, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Two columns: the messages to the model, and its replies."""
    if scene is None or height < 3:
        return []
    over = scene.turn > scene.turns
    where = "the end" if over else f"turn {scene.turn} of {scene.turns}"
    title = f"episode {scene.title}, {where}"
    if scene.turns <= min(20, width - len(title) - 10):
        played = min(scene.turn, scene.turns)
        title += f"  {glyphs.played * played}{glyphs.ahead * (scene.turns - played)}"
    rows = height - 1
    left = max(min(width // 2 - 2, _longest(scene.sees)), width // 4)
    right = width - left - 3
    sees = wrapped(scene.sees, width=left, height=rows)
    says = wrapped(scene.says, width=right, height=rows - 1)
    style = "green" if scene.reward > 0 else "red" if scene.reward < 0 else "dim"
    replies = [*(Text(line) for line in says), Text(f"{glyphs.arrow} {scene.outcome}", style=style)]
    replies += [Text(line, style="dim") for line in scene.earlier]
    shown = max(len(sees), len(replies))
    lines: list[Text] = []
    for row in range(min(rows, shown)):
        line = fit(Text(sees[row] if row < len(sees) else ""), left)
        line.append(f" {glyphs.split} ", style="dim")
        lines.append(line.append_text(replies[row] if row < len(replies) else Text("")))
    blank = [Text(f"{'':>{left}} {glyphs.split}", style="dim")] * (rows - len(lines))
    return [_rule(title, width, glyphs), *lines, *blank]


def _longest(text: str) -> int:
    return max((len(line) for line in text.split("\n")), default=0)


def _notes(frame: Frame, width: int, *, most: int) -> list[Text]:
    """The doctor's findings and what could not be read, a line each."""
    lines: list[Text] = []
    for one in frame.findings:
        line = Text.assemble(
            (one.severity, SEVERITY_STYLES[one.severity]), (f" {one.name}: ", "bold")
        )
        lines.append(line.append(one_line(one.evidence)))
    lines += [
        Text.assemble(("skipped ", "yellow"), one_line(problem)) for problem in frame.view.skipped
    ]
    if not lines:
        return [Text("doctor: nothing to look at", style="dim")]
    if len(lines) > most:
        more = len(lines) - most
        lines = lines[:most]
        lines[-1] = fit(lines[-1], max(width - 12, 20)).append(f" (+{more} more)", style="dim")
    return lines


def _said(frame: Frame, *, most: int) -> list[Text]:
    lines = [line for line in (one_line(line) for line in list(frame.view.said)[-most:]) if line]
    return [Text(line, style="dim") for line in lines]


def _rule(title: str, width: int, glyphs: Glyphs, *, value: str = "") -> Text:
    line = Text.assemble((f"{glyphs.rule * 2} ", "dim"), (title, "bold"))
    if value:
        line.append(f" {value}")
    return line.append(f" {glyphs.rule * max(width - line.cell_len - 1, 0)}", style="dim")


def _apart(left: Text, right: Text, width: int) -> Text:
    room = max(width - right.cell_len - 1, 10)
    return fit(left, room).append(" ").append_text(right)
