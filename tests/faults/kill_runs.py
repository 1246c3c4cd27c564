"""The run that the kill tests kill: small, with a checkpoint after every step."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "learning"))

import torch
from small_runs import small_config

from turnwise.config.schema import Config
from turnwise.train.checkpoint import list_checkpoints
from turnwise.train.run import train


def config_for(folder: Path) -> Config:
    return small_config(
        folder,
        env={
            "name": "frozen_lake",
            "options": {"size": 3},
            "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
            "system_prompt": "Walk.",
        },
        train={"steps": 6, "max_turn": 3, "lr": 0.01, "critic_lr": 0.01, "mini_batches": 2},
        eval={"episodes": 4, "before": True, "after": True, "every": 2},
        checkpoint={"every": 1, "keep": 2},
        log={"dir": str(folder), "name": "run", "report": False},
        model={
            "embedded": {
                "hidden_size": 16,
                "num_layers": 1,
                "num_heads": 2,
                "warmstart_episodes": 32,
            }
        },
    )


def run_to_the_end(folder: str) -> None:
    """Starts the run, or goes on with it where it was begun."""
    torch.set_num_threads(1)
    run = Path(folder) / "run"
    begun = (run / "config.yaml").is_file()
    # Killed between making the folder and writing the config: nothing is lost.
    if run.is_dir() and not begun:
        shutil.rmtree(run)
    train(None if begun else config_for(Path(folder)), resume=run if begun else None, sinks=())


def contents(run: Path) -> dict[str, bytes]:
    """Everything that must be equal to the byte."""
    files = [
        run / "metrics.jsonl",
        run / "ledger.jsonl",
        *run.glob("episodes/*.jsonl"),
        *run.glob("credit/*.jsonl"),
    ]
    last = list_checkpoints(run / "checkpoints")[-1]
    files += [last / "model" / "model.safetensors", last / "trainer.safetensors"]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}
