"""A single-turn environment on prompts from a file: one prompt, one reply, one reward from a
function."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from turnwise.config.schema import Config, DataConfig
from turnwise.envs.base import EnvError
from turnwise.envs.prompt_rewards import built_in_reward
from turnwise.json_lines import read_json_lines
from turnwise.seeding import derive_seed
from turnwise.types import Json, Message, Observation, StepResult, Task
from turnwise.user_code import UnknownNameError, load_named

TAG = "prompts"
Row = Mapping[str, Json]


class PromptEnv:
    """One row of a prompt file per episode. The row's other columns are passed to the reward
    function by name.

    Example:
        >>> rows = {"train": [{"prompt": "2+2?", "answer": "4"}],
        ...     "val": [{"prompt": "1+1?", "answer": "2"}]}
        >>> def reward(prompt, completion, answer):
        ...     return float(completion == answer)
        >>> env = PromptEnv(rows, reward=reward, config=DataConfig())
        >>> task = env.make_task(7, "train")
        >>> env.reset(task).messages[0].content
        '2+2?'
        >>> env.step(Message(role="assistant", content="4")).reward
        1.0
    """

    max_turns: int | None = 1

    def __init__(
        self, rows: Mapping[str, Sequence[Row]], *, reward: Callable[..., Any], config: DataConfig
    ) -> None:
        self._rows = rows
        self._reward = reward
        self._config = config
        self._row: Row | None = None

    def make_task(self, seed: int, split: str) -> Task:
        rows = self._rows["train" if split == "train" else "val"]
        if not rows:
            raise EnvError(
                f"no prompts are left for split {split!r}; add lines, or change data.val_fraction"
            )
        index = derive_seed(seed, "prompt") % len(rows)
        return Task(id=f"{TAG}/{split}/{index}", seed=seed, payload=rows[index], split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._row = task.payload
        prompt = task.payload[self._config.prompt_column]
        if isinstance(prompt, str):
            return Observation(messages=(Message(role="user", content=prompt),))
        return Observation(messages=tuple(Message.from_json(message) for message in prompt))

    def step(self, message: Message) -> StepResult:
        if self._row is None:
            raise EnvError("a prompt has one reply; call reset first")
        row, self._row = dict(self._row), None
        prompt = row.pop(self._config.prompt_column)
        value = self._reward(prompt=prompt, completion=message.content, **row)
        if isinstance(value, bool):
            value = float(value)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvError(
                f"the reward function {self._config.reward} must return a finite number, got "
                f"{value!r}"
            )
        return StepResult(
            messages=(),
            reward=float(value),
            terminated=True,
            action=message.content,
            reward_parts={"reward": float(value)},
            info={"success": value >= 1.0},
        )

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.0, truncated=True)

    def close(self) -> None:
        self._row = None


def read_prompts(config: DataConfig, *, seed: int) -> dict[str, Sequence[Row]]:
    """The rows by split. A row's split depends only on the seed and its number, or on its file.

    Raises:
        ValueError: a row has no prompt column, or a file cannot be read; the message says which.
    """
    if config.prompts is None:
        raise ValueError("training on plain prompts needs data.prompts, a JSONL or parquet file")
    rows = _rows("data.prompts", config.prompts, config)
    if config.val_prompts is not None:
        held = _rows("data.val_prompts", config.val_prompts, config)
        found = {"train": rows.picked(range(len(rows))), "val": held.picked(range(len(held)))}
    else:
        share = config.val_fraction * 10_000
        held_out = [
            derive_seed(seed, "prompt-split", number) % 10_000 < share for number in rows.numbers
        ]
        found = {
            name: rows.picked([index for index, held in enumerate(held_out) if held == wanted])
            for name, wanted in (("train", False), ("val", True))
        }
    if not len(found["train"]):
        raise ValueError(f"{config.prompts} has no prompt to train on")
    return found


def _rows(key: str, where: str, config: DataConfig) -> "_Lines | _Table":
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"{key}: there is no file {path}")
    if path.suffix == ".parquet":
        return _Table(path, column=config.prompt_column)
    return _Lines(path, column=config.prompt_column)


def _no_column(column: str) -> str:
    return f"it has no column {column!r}; see data.prompt_column"


class _Lines:
    """The rows of a JSONL file."""

    def __init__(self, path: Path, *, column: str) -> None:
        def read(row: Any) -> Row:
            if not isinstance(row, dict) or column not in row:
                raise ValueError(_no_column(column))
            return cast(Row, row)

        lines = list(read_json_lines(path, read))
        self.numbers = [number for number, _ in lines]
        """The number of each row's line, which decides its split."""
        self._rows = [row for _, row in lines]

    def __len__(self) -> int:
        return len(self._rows)

    def picked(self, indices: Sequence[int]) -> Sequence[Row]:
        return [self._rows[index] for index in indices]


class _Table:
    """The rows of a parquet file, made one by one: as Python objects, a million of them would fill
    the memory."""

    def __init__(self, path: Path, *, column: str) -> None:
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError(
                f"{path}: parquet files need pyarrow; run: pip install 'turnwise[parquet]'"
            ) from error
        try:
            self._table: Any = cast(Any, parquet).read_table(path)
        except (ValueError, OSError) as error:  # pyarrow's own are of these
            raise ValueError(f"{path} cannot be read as parquet: {error}") from error
        if column not in self._table.column_names:
            raise ValueError(f"{path} cannot be read: {_no_column(column)}")
        self.numbers = range(1, len(self) + 1)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def picked(self, indices: Sequence[int]) -> Sequence[Row]:
        return _Picked(self._table, indices)


class _Picked(Sequence[Row]):
    def __init__(self, table: Any, indices: Sequence[int]) -> None:
        self._table, self._indices = table, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(self._indices[index], 1).to_pylist()[0]


def prompt_factory(config: Config, rows: Mapping[str, Sequence[Row]]) -> Callable[[], PromptEnv]:
    """A factory of prompt environments for a run. Finds the reward function once, at the start."""
    if config.data.reward is None:
        raise ValueError(
            "training on plain prompts needs data.reward: a function named module:function, exact, "
            "or math"
        )
    built_in = built_in_reward(config.data.reward, answer_column=config.data.answer_column)
    if built_in is not None:
        return lambda: PromptEnv(rows, reward=built_in, config=config.data)
    try:
        reward = load_named(config.data.reward)
    except UnknownNameError as error:
        raise ValueError(f"data.reward: {error}") from error
    return lambda: PromptEnv(rows, reward=reward, config=config.data)
