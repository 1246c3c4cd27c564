"""Single-turn environments on TRL's own path, through the reward adapter."""

import pytest
from trl import GRPOTrainer
from trl_parts import curve, make_args, make_trainer

from turnwise.envs.base import EnvError
from turnwise.envs.messages import Rubric, SingleTurnEnv
from turnwise.integrations.trl.mixin import MultiTurnMixin
from turnwise.integrations.trl.rewards import EnvironmentRewardAdapter, as_message
from turnwise.integrations.trl.sources import make_source
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(200)
ROWS = [
    {"question": f"{n}?", "answer": str(n), "info": {"n": n} if n % 2 else {"m": "x"}}
    for n in range(8)
]


def length(completion, prompt, answer, info):
    """Sees messages, and the row as it was given."""
    assert completion[0]["role"] == "assistant"
    assert prompt[0]["role"] == "system"
    assert info == ROWS[int(answer)]["info"]
    return float(len(completion[0]["content"]))


def make_env(function=length):
    return SingleTurnEnv(ROWS, Rubric([function]), system_prompt="Reply.", val_fraction=0.0)


def test_trains_down_trls_path(tmp_path):
    trainer = make_trainer(tmp_path, make_env(), max_completion_length=6)
    assert not trainer.multi_turn
    assert trainer.rollout_func is None
    trainer.train()
    assert trainer._player is None
    assert curve(trainer, "rewards/SingleTurnEnv/mean") == pytest.approx(curve(trainer))


def test_same_numbers_as_plain_grpo(tmp_path):
    """The trainer adds nothing: with the same seed, TRL's own trainer logs the same rewards and
    losses."""
    import torch
    from datasets import Dataset

    def run(make):
        torch.manual_seed(0)
        trainer = make()
        trainer.train()
        return [
            (row["reward"], row["loss"], row["grad_norm"])
            for row in trainer.state.log_history
            if "reward" in row
        ]

    score = EnvironmentRewardAdapter(make_source(make_env()))
    prompts = [
        [m.to_json() for m in opening.messages]
        for opening in make_source(make_env()).openings("train")
    ]
    rows = [
        {"prompt": prompt, "turnwise_row": n, "turnwise_split": "train"}
        for n, prompt in enumerate(prompts)
    ]
    plain = run(
        lambda: GRPOTrainer(
            tiny_model(),
            score,
            args=make_args(tmp_path / "a", max_completion_length=6),
            train_dataset=Dataset.from_list(rows),
            processing_class=tiny_tokenizer(),
        )
    )
    ours = run(lambda: make_trainer(tmp_path / "b", make_env(), max_completion_length=6))
    assert ours == plain


def test_an_explicit_flag_wins(tmp_path):
    trainer = make_trainer(tmp_path, make_env(), multi_turn=True, max_completion_length=6)
    assert trainer.multi_turn
    trainer.train()
    assert curve(trainer, "rollout/turns") == [1.0, 1.0]
    again = make_trainer(tmp_path, make_env(), trainer={"multi_turn": False}, multi_turn=True)
    assert not again.multi_turn


def test_failures_have_no_reward():
    def picky(text, answer):
        if answer == "3":
            raise RuntimeError("cannot score a three")
        return 1.0

    score = EnvironmentRewardAdapter(make_source(make_env(picky)))
    reply = [{"role": "assistant", "content": "x"}]
    assert score([None] * 2, [reply] * 2, turnwise_row=[2, 3]) == [1.0, None]
    with pytest.raises(EnvError, match=r"none of the 2 completions.*cannot score a three"):
        score([None] * 2, [reply] * 2, turnwise_row=[3, 3])


def test_messages_as_trl_parses_them():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    message = as_message([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message.tool_calls[0].arguments == '{"x": 1}'
    parts = as_message(
        [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    )
    assert parts.content == "a"


def test_credit_per_turn_needs_turns(tmp_path):
    with pytest.raises(ValueError, match="is about turns"):
        make_trainer(tmp_path, make_env(), credit="turn_level")


def test_a_named_single_turn_environment(tmp_path):
    trainer = make_trainer(tmp_path, "bandit", max_completion_length=6, num_tasks=8)
    assert not trainer.multi_turn
    trainer.train()


def test_the_mixin_alone_hands_over(tmp_path):
    class Plain(MultiTurnMixin, GRPOTrainer):
        async_generation = False

    from datasets import Dataset

    trainer = Plain(
        tiny_model(),
        lambda completions, **kwargs: [1.0] * len(completions),
        args=make_args(tmp_path, max_completion_length=4),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}] * 8),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert trainer.is_multi_turn_environment("frozen_lake")
