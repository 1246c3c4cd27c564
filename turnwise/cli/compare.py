"""`turnwise compare RUN...`: overlaid curves, config differences, a paired test."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import fail

if TYPE_CHECKING:
    from turnwise.evaluate.evaluation import EvalResult
    from turnwise.log.store import RunReader

CURVES = (
    *("eval/success", "eval/reward", "rollout/success", "rollout/reward"),
    *("train/entropy", "train/approx_kl", "rollout/reply_tokens"),
)


def register(app: typer.Typer) -> None:
    app.command("compare", epilog="Example: turnwise compare runs/a runs/b --out compare.html")(
        compare
    )


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, two or more.", metavar="RUN...")
    ],
    out: Annotated[Path | None, typer.Option(help="Write a page with overlaid curves.")] = None,
) -> None:
    """Compare runs: config differences, curves, and a paired test on the held-out tasks."""
    from turnwise.evaluate.runs import config_differences, held_out
    from turnwise.log.console import sparkline
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader

    if len(runs) < 2:
        fail("name two runs or more, as in `turnwise compare runs/a runs/b`")
    try:
        readers = {_label(path, runs): RunReader(path) for path in runs}
        differences = config_differences({name: one.config for name, one in readers.items()})
        results = {name: held_out(one) for name, one in readers.items()}
    except (RunDirectoryError, RuntimeError) as error:
        fail(str(error))
    print("config:" if differences else "config: no difference")
    for key, values in differences.items():
        print(f"  {key}: " + ", ".join(f"{n} {v!r}" for n, v in zip(readers, values, strict=True)))
    width = max(map(len, readers))
    for curve in CURVES[:4]:
        shown = {name: one.curve(curve) for name, one in readers.items()}
        if not any(values for _, values in shown.values()):
            continue
        print(f"{curve}:")
        for name, (steps, values) in shown.items():
            line = f"{sparkline(values)} {values[-1]:.4g} at step {steps[-1]}" if values else "-"
            print(f"  {name:<{width}}  {line}")
    print("held-out tasks:")
    for line in _verdicts(results):
        print(f"  {line}")
    if out is not None:
        out.write_text(_page(readers, differences), encoding="utf-8")
        print(f"curves in {out}")


def _label(path: Path, runs: list[Path]) -> str:
    """The run's name, or its path if two runs have the same name."""
    same = [other for other in runs if other.name == path.name]
    return path.name if len(same) == 1 else str(path)


def _verdicts(results: "dict[str, EvalResult | None]") -> list[str]:
    from turnwise.evaluate.evaluation import compare as compare_pair

    lines: list[str] = []
    known = {name: result for name, result in results.items() if result is not None}
    lines += [f"{name} has no evaluation" for name in results if name not in known]
    for name, result in known.items():
        success = "" if result.success is None else f"success {result.success}, "
        lines.append(f"{name}: {success}reward {result.reward} over {result.tasks} tasks")
    for name, result in list(known.items())[1:]:
        first = next(iter(known))
        try:
            lines.append(compare_pair(result, known[first]).verdict())
        except ValueError as error:
            lines.append(f"{name} and {first} cannot be paired: {error}")
    return lines


def _page(readers: "dict[str, RunReader]", differences: dict[str, list[object]]) -> str:
    from html import escape

    from turnwise.log.figures import Curve, figure_of
    from turnwise.log.report import page

    figures: list[str] = []
    for name in CURVES:
        curves: list[Curve] = []
        for label, reader in readers.items():
            steps, values = reader.curve(name)
            curves.append(
                Curve(points=list(zip(map(float, steps), values, strict=True)), label=label)
            )
        figures.append(figure_of(name, curves))
    head = "".join(f"<th>{escape(name)}</th>" for name in readers)
    rows = "".join(
        f"<tr><td>{escape(key)}</td>{''.join(f'<td>{escape(repr(v))}</td>' for v in values)}</tr>"
        for key, values in differences.items()
    )
    table = f"<h2>Config</h2><table><tr><th></th>{head}</tr>{rows}</table>"
    return page(
        " and ".join(readers), f'<h2>Curves</h2><div class="curves">{"".join(figures)}</div>{table}'
    )
