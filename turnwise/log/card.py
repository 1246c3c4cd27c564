"""A model card: what a run trained, on what, and how far it got."""

from collections.abc import Sequence
from pathlib import Path

from turnwise.config.schema import Config
from turnwise.log.doctor import diagnose, read_chart
from turnwise.log.events import Evaluated
from turnwise.log.outcome import steps_done, stored_outcome
from turnwise.log.store import RunReader


def model_card(run: RunReader, *, name: str) -> str:
    """README.md of a trained model, in Markdown with the hub's front matter."""
    config, rows = run.config, run.metrics()
    summary = run.summary() or stored_outcome(rows)
    steps = steps_done(rows)
    how = f"`{config.algo.name}`"
    if config.sft.source:
        shown = ", ".join(f"`{source}`" for source in config.sft.source)
        how = f"imitation of {shown}" + (f", then {how}," if config.train.steps else "")
    stored = [summary.get("before"), summary.get("after"), *summary.get("baselines", [])]
    found = [Evaluated.from_json(one) for one in stored if one]
    base = config.model.path or "a small Llama that turnwise builds"
    problems = [one for one in diagnose(read_chart(run)) if one.severity == "problem"]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if config.model.path and "/" in base else []),
        "tags: [turnwise, reinforcement-learning, agent]",
        "---",
        "",
        f"# {name}",
        "",
        f"Trained with turnwise: {how} on `{config.env.name}`, "
        f"{steps} steps, seed {config.seed}, from {base}.",
        "",
        *_results(found),
        *(["", "Known problems:", ""] if problems else []),
        *(f"- {one.name}: {one.evidence}" for one in problems),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        "```",
        "",
        "`config.yaml` beside the weights is the run's config. In the folder where the run was "
        f"started{_with_files(config)}, `turnwise train FOLDER/config.yaml log.name=NEW` trains "
        "the same again; FOLDER is the folder of this card.",
        "",
    ]
    return "\n".join(lines)


def _with_files(config: Config) -> str:
    """The environment's file, which the config names relative to that folder."""
    file = Path(config.env.name.rpartition(":")[0])
    return f" (it has `{file}`)" if file.suffix == ".py" and not file.is_absolute() else ""


def _results(found: Sequence[Evaluated]) -> list[str]:
    if not found:
        return ["The run stored no evaluation."]
    lines = [
        "| held-out tasks | success | reward | episodes |",
        "|---|---|---|---|",
    ]
    for one in found:
        label = one.player if one.label == "baseline" else f"{one.label} training"
        share = "-" if one.success is None else _interval(one.success, percent=True)
        lines.append(f"| {label} | {share} | {_interval(one.reward)} | {one.episodes} |")
    return [*lines, "", "Intervals are 95 %."]


def _interval(values: tuple[float, float, float], *, percent: bool = False) -> str:
    low, middle, high = (f"{100 * value:.1f} %" if percent else f"{value:.3f}" for value in values)
    return f"{middle} [{low}, {high}]"
