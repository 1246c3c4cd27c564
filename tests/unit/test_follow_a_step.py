"""docs/dev/step.md says which files lead from training_step to the optimizer. A real step is traced
to check it."""

import re
import sys
from pathlib import Path
from types import FrameType

from turnwise.config.schema import Config
from turnwise.train.step import training_step
from turnwise.train.trainer import PPOTrainer

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "turnwise"
MOST_FILES = 12


def listed() -> list[tuple[str, str]]:
    """(file, function) of every row of the page."""
    text = (ROOT / "docs/dev/step.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, flags=re.M)


def place(frame: FrameType | None) -> tuple[str, str] | None:
    """(file, function) of a frame in the package."""
    if frame is None or not frame.f_code.co_filename.startswith(str(PACKAGE)):
        return None
    return str(Path(frame.f_code.co_filename).relative_to(PACKAGE)), frame.f_code.co_qualname


def traced_step(folder: Path) -> set[tuple[str, tuple[str, str]]]:
    """(calling file, called function) of everything in a step. Calls through torch and asyncio
    are attributed to the nearest turnwise caller."""
    config = Config.model_validate(
        {
            "model": {
                "embedded": {
                    "hidden_size": 16,
                    "num_layers": 1,
                    "num_heads": 2,
                    "warmstart_episodes": 32,
                }
            },
            "env": {
                "name": "simple_game",
                "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
            },
            "rollout": {
                "train": {"env_groups": 4, "group_size": 4},
                "max_response_tokens": 4,
                "max_context": 256,
            },
            "train": {"steps": 1, "max_turn": 2},
            "log": {"dir": str(folder)},
        }
    )
    trainer = PPOTrainer(config, sinks=())
    calls: set[tuple[str, tuple[str, str]]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        called = place(frame) if event == "call" else None
        if called is None:
            return
        caller = frame.f_back
        while caller is not None and place(caller) is None:
            caller = caller.f_back
        found = place(caller)
        if found is not None:
            calls.add((found[0], called))

    sys.setprofile(note)
    try:
        training_step(
            0,
            proxy=trainer.proxy,
            learner=trainer.learner,
            normalizer=trainer.normalizer,
            pad_id=trainer.policy.tokenizer.pad_token_id,
            exact=True,
        )
    finally:
        sys.setprofile(None)
        trainer.proxy.close()
        trainer.run.close()
    return calls


def test_every_function_on_the_page_is_called_by_a_file_above_it(tmp_path: Path) -> None:
    rows, calls = listed(), traced_step(tmp_path)
    assert rows[0] == ("train/step.py", "training_step")
    assert rows[-1] == ("train/optim.py", "Optimizer.step")
    assert len({file for file, _ in rows}) == len(rows) <= MOST_FILES
    for index, row in enumerate(rows[1:], start=1):
        above = {file for file, _ in rows[:index]}
        callers = {file for file, called in calls if called == row}
        assert callers & above, (
            f"{row} is called by {sorted(callers) or 'nothing'}, not by a file above it"
        )
