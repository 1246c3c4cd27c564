"""Every kind of environment that the trainer takes, and what reward functions and logs see of
it."""

import pytest
from trl_parts import curve, make_trainer

from turnwise.envs.base import BaseEnv
from turnwise.envs.messages import ToolEnv
from turnwise.log.store import RunReader

pytestmark = pytest.mark.timeout(200)


class Walk(BaseEnv):
    """Keeps its state in itself, so that every episode needs an object of its own."""

    instruction = "Walk."
    actions = ("left", "right")

    def reset(self, seed=None, **kwargs):
        self.place = self.start = (seed or 0) % 5
        return f"You are at {self.place}."

    def step(self, action):
        self.place += 1 if action == "right" else -1
        return f"You are at {self.place}.", float(self.place - self.start), False, {}


class Guess:
    """In the style of TRL's environment_factory."""

    def reset(self, target=None, **row):
        self.target, self.log = target, []
        return " It is between 0 and 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        self.log.append(number)
        return "right" if number == self.target else "wrong"

    async def get_reward(self) -> float:
        return 1.0 if self.target in self.log else 0.1


def test_an_object_with_reset_and_step(tmp_path):
    trainer = make_trainer(tmp_path, Walk(), max_turns=2, num_tasks=8, max_completion_length=256)
    trainer.train()
    episodes = RunReader(tmp_path / "run").episodes(1)
    assert {len(episode.turns) for episode in episodes} <= {1, 2}
    for episode in episodes:
        assert episode.prompt[-1].content.startswith(f"You are at {episode.task.seed % 5}.")


def test_a_name(tmp_path):
    trainer = make_trainer(
        tmp_path, "simple_game", max_turns=2, num_tasks=8, max_completion_length=400
    )
    trainer.train()
    assert curve(trainer, "rollout/failures") == [0.0, 0.0]
    assert max(curve(trainer, "rollout/turns")) == 2.0


def test_a_class_in_trls_style(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "target": n} for n in range(8)]
    trainer = make_trainer(
        tmp_path, Guess, trainer={"train_dataset": rows}, max_completion_length=64
    )
    assert trainer.multi_turn
    trainer.train()
    (episode, *_) = RunReader(tmp_path / "run").episodes(1)
    assert episode.prompt[0].content == "Guess. It is between 0 and 9."
    assert episode.tools[0]["function"]["name"] == "guess"
    assert episode.reward == pytest.approx(0.1)


def test_tools(tmp_path):
    def search(query: str) -> str:
        """Searches."""
        return f"result for {query}"

    env = ToolEnv(tools=[search], dataset=[{"prompt": f"{n}"} for n in range(8)], val_fraction=0.0)
    trainer = make_trainer(tmp_path, env, max_completion_length=64)
    assert trainer.multi_turn
    trainer.train()


def test_a_data_set_of_the_users_own(tmp_path):
    from datasets import Dataset
    from trl_parts import ThreeTurns

    rows = Dataset.from_list(
        [{"prompt": f"{n}", "answer": n, "info": {"n": n}} for n in range(100, 108)]
    )
    trainer = make_trainer(tmp_path, ThreeTurns(), trainer={"train_dataset": rows})
    trainer.train()
    answers = {
        episode.task.payload["answer"] for episode in RunReader(tmp_path / "run").episodes(1)
    }
    assert answers <= set(range(100, 108))


def test_tables_show_the_conversation(tmp_path):
    trainer = make_trainer(tmp_path, log_completions=True, num_completions_to_print=1)
    trainer.train()
    if isinstance(trainer._logs["completion"][0], str):
        pytest.skip("this release of TRL has decoded ids in its tables")
    roles = [message["role"] for message in trainer._logs["completion"][0]]
    assert roles == ["assistant", "user", "assistant", "user", "assistant"]
    assert trainer._logs["prompt"][0][0]["role"] == "user"


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    for ahead in (False, True):
        trainer = make_trainer(
            tmp_path,
            trainer={"peft_config": lora},
            enable_async_generation=ahead,
            learning_rate=1e-2,
        )
        trainer.train()
        trainer.close()
        assert max(curve(trainer, "grad_norm")) > 0


def test_half_precision(tmp_path):
    trainer = make_trainer(tmp_path, bf16=True)
    trainer.train()
    assert curve(trainer, "rollout/failures") == [0.0, 0.0]
