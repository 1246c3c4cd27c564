# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The data sets that TRL walks through: which task each row is, and its prompt."""

from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import Env
from turnwise.integrations.trl.sources import COLUMNS, ROW, SPLIT, EnvSource, Row, Stream
from turnwise.types import Json, Observation


def dataset(source: EnvSource, split: str, several: bool) -> Any:
    """The data set of a split: the number of each task, its prompt, and for single turns its
    columns."""
    from datasets import Dataset

    given = source.rows.get(split)
    if isinstance(given, Stream):
        return _stream(source, split, several, given)
    numbers = range(source.length(split))
    rows: list[dict[str, Any]] = [{ROW: number, SPLIT: split} for number in numbers]
    if several:
        for row in rows:
            row["prompt"] = source.placeholder(split, row[ROW])
        return Dataset.from_list(rows)
    for row, opening in zip(rows, source.openings(split), strict=True):
        row["prompt"] = _prompt(source, opening)
    columns = [source.columns(split, number) for number in numbers]
    try:
        return Dataset.from_list(
            [{**column, **row} for column, row in zip(columns, rows, strict=True)]
        )
    except Exception:
        # Columns whose rows differ in type do not fit into an Arrow table; the environment has
        # them.
        return Dataset.from_list(rows)


def eval_datasets(source: EnvSource, given: Any, several: bool) -> Any:
    """The user's data set for evaluation, or data sets by name, in the form that TRL takes."""
    if isinstance(given, Mapping):
        return {name: _eval_dataset(source, given[name], str(name), several) for name in given}
    return _eval_dataset(source, given, "", several)


def _eval_dataset(source: EnvSource, given: Any, name: str, several: bool) -> Any:
    if ROW in (getattr(given, "column_names", None) or ()):
        return given  # made here: Trainer.evaluate hands the members of a dict back one by one
    split = f"val-{name}" if name else "val"
    source.use_rows(split, given, name=f"eval_dataset[{name!r}]" if name else "eval_dataset")
    return dataset(source, split, several)


def _stream(source: EnvSource, split: str, several: bool, stream: Stream) -> Any:
    env: Env | None = None if several else source.ask("making it", source.factory)

    def convert(row: Row, number: int) -> dict[str, Any]:
        stream.known[number] = row
        return {ROW: number, SPLIT: split, "prompt": prompt(number), COLUMNS: dict(row)} | (
            {} if several else source.columns(split, number)
        )

    def prompt(number: int) -> list[dict[str, Json]] | str:
        if env is None:
            return source.placeholder(split, number)
        return _prompt(source, source.opening(env, split, number))

    names = list(stream[0])
    return stream.dataset.map(convert, with_indices=True, remove_columns=names)


def _prompt(source: EnvSource, opening: Observation) -> list[dict[str, Json]] | str:
    """TRL's form of a prompt: messages, or the text that is to be continued."""
    if source.texts:
        return opening.messages[0].content
    return [message.to_json() for message in opening.messages]
