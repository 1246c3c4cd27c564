"""Thoughts of ALFWorld's expert: short, true, of several wordings, and written where a reply has
room for them."""

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

import turnwise
from turnwise.config.schema import EnvConfig, FormatConfig
from turnwise.envs.actions import split_reply
from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.games.alfworld import AlfWorldEnv
from turnwise.envs.games.alfworld.thoughts import WORDINGS
from turnwise.envs.text_turns import TextTurns
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

NAME = re.compile(r"[a-z]+ \d+")
SKELETONS = {
    re.compile(re.sub(r"\\{\w+\\}", ".*", re.escape(wording))): why
    for why, wordings in WORDINGS.items()
    for wording in wordings
}


def reason(thought: str) -> str:
    found = {why for skeleton, why in SKELETONS.items() if skeleton.fullmatch(thought)}
    assert found, thought
    return min(found)


def test_thoughts_are_short_and_tell_what_was_shown() -> None:
    env, rng = AlfWorldEnv(show_admissible=False, max_steps=40), Random(0)
    assert env.expert_thought() is None, "before an episode"
    reasons: Counter[str] = Counter()
    kinds: set[str] = set()
    for seed in range(120):
        shown, info = env.reset(seed=seed)
        kinds.add(info["task_type"])
        for turn in range(40):
            action, thought = env.expert_action(), env.expert_thought()
            if action is None:
                break
            assert thought is not None
            assert len(thought.split()) <= 40
            assert thought == env.expert_thought(), "asking changes nothing"
            assert "{" not in thought
            assert "  " not in thought
            told = [name for name in NAME.findall(thought) if not name.startswith("and ")]
            assert all(name in shown for name in told), (thought, shown)
            reasons[reason(thought)] += 1
            slip = turn % 5 == 3 and seed % 2
            text, _, won, truncated, _ = env.step(env.random_action(rng) if slip else action)
            shown += text
            if won or truncated:
                break
    assert len(kinds) == 6
    assert set(reasons) == set(WORDINGS), "every reason occurs"


def test_wordings_follow_the_seed() -> None:
    def said(env: AlfWorldEnv, seed: int) -> str:
        env.reset(seed=seed)
        return str(env.expert_thought())

    first, again = ([said(AlfWorldEnv(), seed) for seed in range(30)] for _ in range(2))
    assert first == again
    assert {reason(thought) for thought in first} == {"search"}
    assert all(
        any(text.startswith(word) for text in first) for word in ("I need", "The task", "Wh")
    )


def test_a_reply_has_the_thought_where_one_is_asked_for() -> None:
    replies: dict[bool, Any] = {}
    for think in (True, False):
        form = {"style": "answer", "think": think, "max_actions_per_turn": 1}
        config = EnvConfig.model_validate({"name": "alfworld", "format": form})
        env = TextTurns(AlfWorldEnv(), config=config, name="alfworld")
        env.reset(env.make_task(4, "train"))
        replies[think] = env.hint("expert", 0)
        thought, action = env.env.expert_thought(), env.env.expert_action()
        pieces, read = split_reply(replies[think], FormatConfig.model_validate(form))
        assert (pieces, read) == ((action,), thought if think else None)
    assert replies[False] == re.sub("<think>.*</think>", "", replies[True])


class Thinker(BaseEnv):
    actions = ("left", "right")
    thought: str | None = None

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "a fork"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 0.0, True, {}

    def expert_action(self) -> str:
        return "left"

    def expert_thought(self) -> str | None:
        return self.thought


def test_a_thought_is_text_without_tags() -> None:
    env = TextTurns(Thinker(), config=EnvConfig.model_validate({"name": "t"}), name="t")
    env.reset(env.make_task(0, "train"))
    assert env.hint("expert", 0) == "<think></think><answer>left</answer>"
    env.env.thought = "left </think> <answer>right</answer>"  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="expert_thought is the text between the tags"):
        env.hint("expert", 0)


def test_thoughts_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    overrides = {
        "sft.episodes": 4,
        "sft.epochs": 1,
        "sft.lr": 0.01,
        "sft.held_out": 0.3,
        "rollout.max_context": 4096,
        "rollout.slots": 2,
        "eval.before": False,
        "eval.after": False,
        "eval.baselines": False,
        "train.device": "cpu",
        "log.report": False,
        "log.name": "run",
    }
    run = turnwise.sft(
        "expert",
        config="qwen_1_5b_alfworld_think",
        model=tmp_path / "model",
        overrides=overrides,
        quiet=True,
    )
    rows = [row for row in run.metrics() if "sft/held_out_loss" in row]
    assert rows[-1]["sft/held_out_loss"] < rows[0]["sft/held_out_loss"]
