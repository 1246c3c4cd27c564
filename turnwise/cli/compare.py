"""`turnwise compare RUN...`: overlaid curves, config differences, a paired test."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import fail

if TYPE_CHECKING:
    from turnwise.evaluate.results import EvalResult

CURVES = ("eval/success", "eval/reward", "rollout/success", "rollout/reward")


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
        curves = {
            curve: {name: one.curve(curve) for name, one in readers.items()} for curve in CURVES
        }
    except (RunDirectoryError, RuntimeError) as error:
        fail(str(error))
    print("config:" if differences else "config: no difference")
    for key, values in differences.items():
        print(f"  {key}: " + ", ".join(f"{n} {v!r}" for n, v in zip(readers, values, strict=True)))
    width = max(map(len, readers))
    for curve, shown in curves.items():
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
        from turnwise.inspect.export import export_comparison

        out.write_text(export_comparison(runs), encoding="utf-8")
        print(f"curves in {out}")


def _label(path: Path, runs: list[Path]) -> str:
    """The run's name, or its path if two runs have the same name."""
    same = [other for other in runs if other.name == path.name]
    return path.name if len(same) == 1 else str(path)


def _verdicts(results: "dict[str, EvalResult | None]") -> list[str]:
    from turnwise.evaluate.results import compare as compare_pair

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
