"""What the tests of the TRL integration share: a three-turn environment, a tiny model, and a quick
trainer."""

import os
import re
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from turnwise.envs.messages import MultiTurnEnv

LOW, HIGH = "low", "high"
WANTED = (LOW, HIGH, LOW)


def kind(text: str) -> str:
    """Which half of ASCII a reply's first character is in; "none" for all else."""
    if not text or ord(text[0]) > 127:
        return "none"
    return LOW if ord(text[0]) < 64 else HIGH


class ThreeTurns(MultiTurnEnv):
    """Says which half of ASCII it wants, three times; pays a third for each reply that begins in
    it."""

    latency = 0.0
    fail_rows: tuple[int, ...] = ()
    hang_rows: tuple[int, ...] = ()
    stop_early = False
    wordy = False
    """Adds as many characters to what it says as the number of its row."""

    def __init__(self, rows: int = 8, val_fraction: float = 0.0, **kwargs: Any) -> None:
        super().__init__(
            [{"prompt": f"{n}", "answer": n, "info": {"n": n}} for n in range(rows)],
            val_fraction=val_fraction,
            max_turns=3,
            **kwargs,
        )
        self.calls = 0

    def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        state["turn_reward"] = float(kind(messages[-1]["content"]) == WANTED[state["turn"] - 1]) / 3
        if self.stop_early and state["info"]["n"] % 2 and state["turn"] == 2:
            return True
        return state["turn"] == 3

    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if state["info"]["n"] in self.fail_rows:
            raise RuntimeError(f"row {state['info']['n']} is broken")
        time.sleep(1000.0 if state["info"]["n"] in self.hang_rows else self.latency)
        padding = "x" * state["info"]["n"] if self.wordy else ""
        return [{"role": "user", "content": WANTED[state["turn"]] + padding}], state


def make_args(folder: Any, **changes: Any) -> Any:
    from turnwise.integrations.trl import VerifiersGRPOConfig

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 2,
        "max_completion_length": 64,
        "max_tokens_per_turn": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "async_timeout": 60,
        "env_threads": 16,
    }
    return VerifiersGRPOConfig(str(folder), **{**settings, **changes})


def make_trainer(
    folder: Any,
    env: Any = None,
    *,
    cls: Any = None,
    model: Any = None,
    trainer: Any = None,
    **changes: Any,
):
    """A trainer on a tiny model; `changes` go into its arguments."""
    from turnwise.integrations.trl import VerifiersGRPOTrainer
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    cls = cls or VerifiersGRPOTrainer
    keywords = {"processing_class": tiny_tokenizer(), **(trainer or {})}
    return cls(
        model or tiny_model(),
        env if env is not None else ThreeTurns(),
        make_args(folder, **changes),
        **keywords,
    )


def page_blocks(page: str, runner: str) -> list[str]:
    """Blocks of Python of a page of the documentation that say which file runs them."""
    file = Path(runner)
    text = (file.parents[2] / "docs" / page).read_text(encoding="utf-8")
    mark = re.escape(f"<!-- run by tests/integrations/{file.name} -->")
    return re.findall(rf"{mark}\n```python\n(.*?)```", text, re.DOTALL)


def save_model(folder: Path, template: str = "chatml") -> str:
    """The folder of a tiny model with its tokenizer."""
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    tiny_model().save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return str(folder)


def curve(trainer: Any, name: str = "reward") -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]
