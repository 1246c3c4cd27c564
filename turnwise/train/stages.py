"""From demonstrations to training: imitation as the first stage of a run."""

import gc
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turnwise.config.schema import Config
from turnwise.inspect.report import ReportSink
from turnwise.log.events import Event, RunEnded, Sink, Sinks
from turnwise.procs.stop import Stopped
from turnwise.train.base import RunResult
from turnwise.train.checkpoint import write_folder
from turnwise.train.networks import save_pretrained
from turnwise.train.sft import SftTrainer

STAGE = "imitation"
"""Folder of the first stage in the run directory of the whole run."""


class StageStopped(Stopped):
    """The first stage was stopped; `result` says where the run is."""

    def __init__(self, reason: str, result: RunResult) -> None:
        super().__init__(reason)
        self.result = result


class _StageSink:
    """Those among the sinks of a whole run that hear of its first stage."""

    def __init__(self, sinks: Sinks) -> None:
        self._sinks = Sinks(sinks.that_hear("stages"))

    def handle(self, event: Event) -> None:
        # The next command of a stage is the next stage, so no checkpoint is offered.
        ended = isinstance(event, RunEnded)
        self._sinks.handle(replace(event, checkpoint=None) if ended else event)

    def close(self) -> None:
        """The sinks go on."""


def imitate_first(config: Config, *, initial: Path, sinks: Sinks) -> tuple[nn.Module, Any]:
    """(model, tokenizer) after the imitation that precedes a run's training.

    It is a run directory of its own, in the folder of the whole run, and goes on where it was
    stopped. Its model is stored at `initial`, unless no checkpoints are written.

    Raises:
        StageStopped: it was stopped before its end.
    """
    folder = initial.parent / STAGE
    begun = (folder / "config.yaml").is_file()
    if folder.is_dir() and not begun:  # killed before anything was written
        shutil.rmtree(folder)
    changes = {
        "train": {"steps": 0},
        "eval": {"after": False},  # the run evaluates it before its own first step
        "log": {"dir": str(folder.parent), "name": STAGE, "trackers": (), "callbacks": ()},
    }
    parts = {key: getattr(config, key).model_copy(update=new) for key, new in changes.items()}
    listeners: list[Sink] = [_StageSink(sinks), *([ReportSink()] if config.log.report else [])]
    trainer = SftTrainer(
        config.model_copy(update=parts), resume=folder if begun else None, sinks=listeners
    )
    result = trainer.fit()
    if result.stopped is not None:
        whole = replace(result, path=folder.parent, steps=0)
        raise StageStopped(result.stopped, whole)
    model, tokenizer = trainer.release()
    del trainer  # the optimizer's moments and the keys and values of the evaluation
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if config.checkpoint.write:
        write_folder(initial, lambda path: save_pretrained(model, tokenizer, path))
    return model, tokenizer
