"""A single-turn environment on prompts from a file: one prompt, one reply, one reward from a
function."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from turnwise.config.schema import Config, DataConfig
from turnwise.envs.base import EnvError
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
        self, rows: Mapping[str, list[Row]], *, reward: Callable[..., Any], config: DataConfig
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


def read_prompts(config: DataConfig, *, seed: int) -> dict[str, list[Row]]:
    """The file's rows by split. A row's split depends only on the seed and the line.

    Raises:
        ValueError: a line is not a JSON object with the prompt column; the message names the line.
    """
    if config.prompts is None:
        raise ValueError("training on plain prompts needs data.prompts, a JSONL file")
    rows: dict[str, list[Row]] = {"train": [], "val": []}
    path = Path(config.prompts)
    if not path.is_file():
        raise ValueError(f"data.prompts: there is no file {path}")

    def read(row: Any) -> Row:
        if not isinstance(row, dict) or config.prompt_column not in row:
            raise ValueError(f"it has no column {config.prompt_column!r}; see data.prompt_column")
        return cast(Row, row)

    for number, row in read_json_lines(path, read):
        held_out = derive_seed(seed, "prompt-split", number) % 10_000 < config.val_fraction * 10_000
        rows["val" if held_out else "train"].append(row)
    if not rows["train"]:
        raise ValueError(f"{path} has no prompt to train on")
    return rows


def prompt_factory(config: Config) -> Callable[[], PromptEnv]:
    """A factory of prompt environments for a run. Reads the file and finds the reward function
    once, at the start."""
    if config.data.reward is None:
        raise ValueError(
            "training on plain prompts needs data.reward, a function named module:function"
        )
    rows = read_prompts(config.data, seed=config.seed)
    try:
        reward = load_named(config.data.reward)
    except UnknownNameError as error:
        raise ValueError(f"data.reward: {error}") from error
    return lambda: PromptEnv(rows, reward=reward, config=config.data)
