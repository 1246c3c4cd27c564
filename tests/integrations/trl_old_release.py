"""What test_trl_releases.py runs with another release of TRL."""

import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from trl_parts import ThreeTurns, curve, make_args, make_trainer

from turnwise.envs.messages import Rubric, SingleTurnEnv
from turnwise.integrations.trl import VerifiersGRPOTrainer
from turnwise.log.store import RunReader
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
folder = Path(sys.argv[1])
print("trl", trl.__version__)


class Recording(VerifiersGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        mask = (output["completion_mask"] * output["tool_mask"]).bool()
        for index, row in enumerate(self._rows):
            sampled = [token for turn in row.episode.turns for token in turn.completion.ids]
            assert row.failed or output["completion_ids"][index][mask[index]].tolist() == sampled
        return output


for number, settings in enumerate(
    [
        {},
        {"enable_async_generation": True, "num_batches_ahead": 2, "max_steps": 4},
        {"credit": "turn_level", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        {"engine": "trl"},
    ]
):
    env = ThreeTurns()
    env.fail_rows = (3,)
    trainer = make_trainer(folder / f"multi{number}", env, cls=Recording, **settings)
    trainer.train()
    trainer.close()
    assert all(torch.isfinite(torch.tensor(curve(trainer, "loss"))))
    assert RunReader(folder / f"multi{number}" / "run").ledger()[0].broken == 0
    print("ok", settings)

rows = [{"question": f"{n}?", "answer": str(n)} for n in range(8)]
single = SingleTurnEnv(rows, Rubric([lambda text: float(len(text))]), val_fraction=0.0)
trainer = make_trainer(folder / "single", single, max_completion_length=6)
trainer.train()
assert not trainer.multi_turn
print("ok single-turn")


def length(completions, **row):
    return [float(len(text)) for text in completions]


trainer = VerifiersGRPOTrainer(
    tiny_model(),
    args=make_args(folder / "plain", max_completion_length=6),
    reward_funcs=length,
    train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows]),
    processing_class=tiny_tokenizer(),
)
trainer.train()
assert max(curve(trainer)) > 0
print("ok without an environment")
