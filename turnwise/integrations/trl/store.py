"""The run directory of a TRL run: the same files as the native trainer's, written by the first
process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from turnwise.config.schema import Config, LogConfig
from turnwise.data.samples import contexts
from turnwise.integrations.trl.credit import TrainRow, sampled_ids
from turnwise.integrations.trl.mapping import updates_per_step
from turnwise.log.store import CreditRow, LedgerEntry, RunDirectory
from turnwise.types import Episode


class RunStore(TrainerCallback):
    """Opens a run directory when training begins, writes into it, and closes it at the end.

    Args:
        folder: where `run`, `run-2`, .. are created. None: the caller gave a directory and closes
            it.
    """

    def __init__(
        self, folder: Path | None, config: Config, *, run: RunDirectory | None = None
    ) -> None:
        self.run = run
        self._owned = run is None
        self._folder = folder
        self._config = config
        self._step = -1
        self._episodes: list[Episode] = []
        self._credit: list[CreditRow] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.run is None and self._folder is not None:
            self.run = self._open(resumed=state.global_step > 0)
        if self.run is not None and state.global_step > 0:
            self.run.truncate_to(state.global_step)
            self.run.write_event(
                "resumed", f"goes on after step {state.global_step}", step=state.global_step
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.run is None or not logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.run.write_metrics(state.global_step, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is not None and self._owned:
            self.run.close()
            self.run = None

    def event(self, kind: str, message: str, step: int) -> None:
        if self.run is not None:
            self.run.write_event(kind, message, step=step)

    def write(
        self,
        step: int,
        episodes: Sequence[Episode],
        *,
        credit: Sequence[CreditRow],
        ledger: LedgerEntry,
        split: str,
    ) -> None:
        """Stores a generation. Those of one step are one file; rows carry the number of steps done
        after it."""
        if self.run is None:
            return
        if split != "train":
            self.run.write_episodes(step, episodes, split="eval")
            return
        if step != self._step:
            self._step, self._episodes, self._credit = step, [], []
        self._episodes.extend(episodes)
        self._credit.extend(credit)
        self.run.write_ledger(ledger)
        log, before = self._config.log, (step - 1) // updates_per_step(self._config)
        if log.episodes_every and before % log.episodes_every == 0:
            self.run.write_episodes(step, self._episodes)
            if log.credit:
                self.run.write_credit(step, self._credit)

    def _open(self, *, resumed: bool) -> RunDirectory:
        assert self._folder is not None
        before = sorted(
            self._folder.glob("run*/config.yaml"), key=lambda path: path.stat().st_mtime
        )
        if resumed and before:
            return RunDirectory.open(before[-1].parent)
        return RunDirectory.create(
            LogConfig(dir=str(self._folder)), self._config, default_name="run"
        )


def trained_and_sampled(
    output: dict[str, Any], rows: Sequence[TrainRow]
) -> list[tuple[list[int], list[int]]]:
    """(ids that were sampled, ids that the loss reads) of every row of TRL's batch, for the
    ledger."""
    masks = (output["tool_mask"] * output["completion_mask"]).bool().cpu()
    ids = output["completion_ids"].cpu()
    pairs: list[tuple[list[int], list[int]]] = []
    for index, row in enumerate(rows):
        trained = ids[index][masks[index]].tolist()
        # mask_truncated_completions leaves whole rows out; those are not trained on.
        pairs.append((sampled_ids(row) if trained else [], trained))
    return pairs


def credit_rows(output: dict[str, Any], rows: Sequence[TrainRow]) -> list[CreditRow]:
    """The advantages of the tokens that were sampled, by episode and context; failed episodes have
    none."""
    advantages = output["advantages"].detach().cpu()
    found: list[CreditRow] = []
    for index, row in enumerate(rows):
        if row.sample is None:
            continue
        values = advantages[index]
        last = len(contexts(row.episode.turns)) - 1
        found.append(
            CreditRow(
                episode_id=row.episode.id,
                sample=row.context if row.context >= 0 else last,
                turn_ids=tuple(turn for turn in row.sample.turn_ids if turn >= 0),
                advantages=tuple(
                    float(values if values.dim() == 0 else values[place])
                    for place, mine in enumerate(row.mask)
                    if mine
                ),
            )
        )
    return found
