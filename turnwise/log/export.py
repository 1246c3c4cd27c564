"""A run's episodes in formats that other tools read: JSONL, Parquet, a Hugging Face data set,
conversations for supervised fine-tuning."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from turnwise.data.table import Row, rows
from turnwise.log.store import RunReader
from turnwise.types import Episode

Format = Literal["jsonl", "parquet", "hf", "sft"]
Per = Literal["episode", "turn"]


class ExportError(RuntimeError):
    """Nothing could be written; the message says what is missing."""


def export_run(
    run: RunReader,
    out: Path,
    *,
    format: Format,
    per: Per = "episode",
    split: Literal["step", "eval"] = "step",
    steps: Sequence[int] | None = None,
    min_reward: float | None = None,
) -> int:
    """How many rows were written to `out`.

    Args:
        per: a row is an episode, or a turn with its token ids and log-probs.
        steps: which steps. None: all that are stored.
        min_reward: leave out episodes below it. sft without it: those that did not succeed.

    Raises:
        ExportError: a package is missing, or there is no episode to write.
    """
    if format == "sft":
        good = [e for _, e in _played(run, split, steps) if _good(e, min_reward)]
        table = [row for episode in good for row in conversations(episode)]
    else:
        table = _table(run, per=per, split=split, steps=steps, min_reward=min_reward)
    if not table:
        raise ExportError(
            f"{run.path} has no such episode to write; see --split, --step and --min-reward"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    if format == "parquet":
        arrow, parquet = _load("pyarrow"), _load("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(table), beside)
    elif format == "hf":
        _load("datasets").Dataset.from_list(table).save_to_disk(str(out))
        return len(table)
    else:
        with beside.open("w", encoding="utf-8") as file:
            for row in table:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    beside.replace(out)
    return len(table)


def _table(
    run: RunReader,
    *,
    per: Per,
    split: Literal["step", "eval"],
    steps: Sequence[int] | None,
    min_reward: float | None,
) -> list[Row]:
    played = [
        (step, episode)
        for step, episode in _played(run, split, steps)
        if min_reward is None or episode.reward >= min_reward
    ]
    if per == "episode":
        found = rows(episode for _, episode in played)
        extra = [{"step": step, "messages": messages_of(episode)} for step, episode in played]
    else:
        found = rows((episode for _, episode in played), per="turn")
        extra = [
            {
                "step": step,
                "completion_ids": list(turn.completion.ids),
                "completion_logprobs": list(turn.completion.logprobs),
            }
            for step, episode in played
            for turn in episode.turns
        ]
    return [{**more, **row} for row, more in zip(found, extra, strict=True)]


def messages_of(episode: Episode) -> list[Row]:
    """The whole conversation, the model's replies as it said them."""
    said = [message.to_json() for message in episode.prompt]
    for turn in episode.turns:
        said.append({"role": "assistant", "content": turn.text, "weight": int(turn.trained)})
        said += [message.to_json() for message in turn.messages]
    return [
        {"role": one["role"], "content": one["content"]}
        | ({"weight": 0} if one.get("weight") == 0 else {})
        for one in said
    ]


def conversations(episode: Episode) -> Iterator[Row]:
    """Rows for supervised fine-tuning: the conversation, and another one for each time that the
    environment rewrote it. What the environment said after the last reply is left out: nothing is
    learned from it. A reply that is not to be learned has weight 0."""
    ends = [place for place, turn in enumerate(episode.turns, 1) if turn.rewritten is not None]
    prompt, tools = episode.prompt, episode.tools
    for start, end in pairwise(sorted({0, *ends, len(episode.turns)})):
        messages = messages_of(replace(episode, prompt=prompt, turns=episode.turns[start:end]))
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        row: Row = {"messages": messages, "reward": episode.reward, "task": episode.task.id}
        if episode.success is not None:
            row["success"] = episode.success
        yield {**row, "tools": [dict(tool) for tool in tools]} if tools else row
        following = episode.turns[end - 1].rewritten
        if following is not None:
            prompt, tools = following.messages, following.tools


def _good(episode: Episode, min_reward: float | None) -> bool:
    if episode.status.failed or not episode.turns:
        return False
    return bool(episode.success) if min_reward is None else episode.reward >= min_reward


def _played(
    run: RunReader, split: Literal["step", "eval"], steps: Sequence[int] | None
) -> Iterator[tuple[int, Episode]]:
    for step in run.steps(split=split) if steps is None else steps:
        for episode in run.episodes(step, split=split):
            yield step, episode


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ExportError(
            f"this format needs the package {package!r} ({error}); run: pip install {package}, or "
            "choose --format jsonl"
        ) from error
