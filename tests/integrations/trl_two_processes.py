"""What each of two processes does in test_trl_processes.py: `torchrun ... trl_two_processes.py
FOLDER SETTINGS`."""

import inspect
import json
import sys
from pathlib import Path

import torch
from trl_parts import ThreeTurns, curve, make_trainer

from turnwise.integrations.trl import VerifiersGRPOTrainer


class Ragged(ThreeTurns):
    """Episodes of one to three turns: one process may be done while the other still plays."""

    fail_all = False

    def setup_state(self, state):
        if self.fail_all:
            raise RuntimeError("nothing works")
        return state

    def is_completed(self, messages, state, **kwargs):
        done = super().is_completed(messages, state, **kwargs)
        return done or state["turn"] >= 1 + state["info"]["n"] % 3


class Recording(VerifiersGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("seen", []).append(
            {
                "rows": [row["turnwise_row"] for row in inputs],
                "tasks": [row.episode.task.payload["answer"] for row in self._rows],
                "failed": [row.failed for row in self._rows],
                "turns": [len(row.episode.turns) for row in self._rows],
                "rewards": [row.episode.reward for row in self._rows],
                "ids": [row.completion_ids for row in self._rows],
                "groups": [row.episode.group_id for row in self._rows],
                "advantages": output["advantages"].tolist(),
            }
        )
        return output


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    env = Ragged()
    env.fail_rows = tuple(settings.pop("fail_rows", ()))
    env.fail_all = settings.pop("fail_all", False)
    trainer = make_trainer(folder / "out", env, cls=Recording, **settings)
    if settings.get("engine") == "trl":
        calls = trainer._generate_single_turn

        def counted(prompts, *args, **kwargs):
            trainer.__dict__.setdefault("sizes", []).append(len(prompts))
            return calls(prompts, *args, **kwargs)

        trainer._generate_single_turn = counted
        counted.__signature__ = inspect.signature(calls)
    error = None
    try:
        trainer.train()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    weights = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
    result = {
        "seen": trainer.__dict__.get("seen", []),
        "sizes": trainer.__dict__.get("sizes", []),
        "weights": weights,
        "error": error,
        "staleness": curve(trainer, "rollout/staleness"),
    }
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.close()


if __name__ == "__main__":
    main()
