"""Prompts from parquet files, rewards by the answer beside a prompt, passes over the data, and the
punishment of long replies."""

import json
from pathlib import Path

import pytest

from turnwise.config import load_config
from turnwise.config.schema import Config, DataConfig
from turnwise.envs.base import EnvError
from turnwise.envs.prompt_rewards import built_in_reward
from turnwise.envs.prompts import read_prompts
from turnwise.envs.shaping import Overlong
from turnwise.evaluate.evaluation import evaluate
from turnwise.evaluate.replay import replay_episodes
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.load_policy import load_policy
from turnwise.train.networks import save_pretrained
from turnwise.train.setup import choose_setting
from turnwise.train.trainer import PPOTrainer
from turnwise.types import Message

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {n} + {n}?"}],
        "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
        "extra_info": {"index": n},
    }
    for n in range(40)
]
VERL = "reward_model.ground_truth"


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_parquet_and_jsonl_have_the_same_rows_and_splits(tmp_path: Path) -> None:
    found = [
        read_prompts(DataConfig(prompts=write(tmp_path / name, ROWS), val_fraction=0.3), seed=4)
        for name in ("a.parquet", "a.jsonl")
    ]
    for split in ("train", "val"):
        table, lines = (list(one[split]) for one in found)
        assert table == lines
        assert len(table) > 5
    assert len(found[0]["train"]) + len(found[0]["val"]) == len(ROWS)


def test_held_out_prompts_of_their_own(tmp_path: Path) -> None:
    train, val = (write(tmp_path / f"{name}.parquet", rows) for name, rows in
                  (("train", ROWS[:30]), ("val", ROWS[30:])))  # fmt: skip
    found = read_prompts(DataConfig(prompts=train, val_prompts=val), seed=0)
    assert list(found["train"]) == ROWS[:30]
    assert list(found["val"]) == ROWS[30:]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 not a table PAR1")
    cases = (
        ({"prompts": str(torn)}, "torn.parquet cannot be read as parquet"),
        ({"prompts": str(tmp_path / "no.parquet")}, "data.prompts: there is no file"),
        ({"prompts": str(torn), "val_prompts": "no.jsonl"}, "cannot be read as parquet"),
        ({"prompts": write(tmp_path / "b.parquet", [{"question": "?"}])}, "no column 'prompt'"),
    )
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            read_prompts(DataConfig(**settings), seed=0)


@pytest.mark.parametrize(
    ("completion", "row", "value"),
    [
        ("6 * 7\nAnswer: 42", {"answer": "42"}, 1.0),
        ("it is 42", {"answer": "42"}, 0.0),
        ("\\boxed{42.0}", {"answer": 42, "data_source": "lighteval/MATH"}, 1.0),
        ("Answer: 41\nNo.\nanswer : 42 ", {"answer": "42"}, 1.0),
        ("Answer: 42" + "." * 400, {"answer": "42", "data_source": "math_dapo"}, -1.0),
        ("so\nAnswer: 42", {"answer": "42", "data_source": "aime2024"}, 1.0),
        ("42", {"answer": "42", "data_source": "aime2024"}, -1.0),
        ("so\nAnswer: 1,000", {"answer": "1000", "data_source": "math_dapo"}, 1.0),
    ],
)
def test_the_answer_decides(completion: str, row: dict, value: float) -> None:
    reward = built_in_reward("exact", answer_column="answer")
    assert reward is not None
    assert reward(prompt="?", completion=completion, **row) == value


def test_rewards_of_others() -> None:
    assert built_in_reward("mine.py:reward", answer_column="answer") is None
    reward = built_in_reward("exact", answer_column=VERL)
    assert reward is not None
    with pytest.raises(EnvError, match="does not score data_source 'codecontests'"):
        reward(completion="x", data_source="codecontests", reward_model={"ground_truth": "x"})
    with pytest.raises(EnvError, match=r"no column 'reward_model\.ground_truth'"):
        reward(completion="x", answer="x")


def test_mathematics_needs_its_extra() -> None:
    pytest.importorskip("math_verify")
    reward = built_in_reward("math", answer_column="answer")
    assert reward is not None
    assert reward(completion="\\boxed{\\frac{1}{2}}", answer="0.5") == 1.0


def config_of(tmp_path: Path, *overrides: str) -> Config:
    save_pretrained(tiny_model(), tiny_tokenizer(), tmp_path / "model")
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "prompts": write(tmp_path / "train.parquet", ROWS[:30]),
            "val_prompts": write(tmp_path / "val.parquet", ROWS[30:]),
            "reward": "exact",
            "answer_column": VERL,
            "epochs": 2,
        },
        "env": {"shaping": {"overlong_tokens": 6, "overlong_penalty": 0.5}},
        "rollout": {"train": {"env_groups": 8, "group_size": 2}, "max_response_tokens": 8},
        "algo": {"name": "grpo"},
        "train": {"multi_turn": False, "device": "cpu"},
        "eval": {"before": False, "after": False, "episodes": 4},
        "log": {"dir": str(tmp_path / "runs"), "name": "a"},
        "checkpoint": {"write": False},
    }
    return load_config(tree, overrides)


def test_passes_over_the_prompts_are_steps(tmp_path: Path) -> None:
    setting = choose_setting(config_of(tmp_path))
    assert setting.config.train.steps == 7  # 2 * 30 prompts, 8 at a time
    assert choose_setting(config_of(tmp_path, "train.steps=3")).config.train.steps == 3
    env = setting.factories["prompts"]()
    env.reset(env.make_task(3, "val"))
    assert env.step(Message(role="assistant", content="Answer: 1")).reward == -1.0


def test_a_run_on_a_parquet_file_punishes_long_replies(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.steps=1")
    PPOTrainer(config).fit()
    setting = choose_setting(config)
    result = evaluate(setting.config, load_policy(config), episodes=4, factories=setting.factories)
    rule = Overlong(limit=8, tokens=6, penalty=0.5)
    lengths = set()
    for episode in result.episodes:
        (turn,) = episode.turns
        length = len(turn.completion.ids)
        lengths.add(length)
        assert turn.reward == pytest.approx(-1.0 + rule.reward(length))
        assert turn.reward_parts.get("overlong", 0.0) == pytest.approx(rule.reward(length))
        factories = {episode.tag: setting.factories["prompts"]}
        assert replay_episodes([episode], setting.config, factories=factories) == [None]
    assert max(lengths) > 2  # some are punished
