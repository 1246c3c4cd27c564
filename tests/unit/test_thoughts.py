"""Thoughts: an instruction that shows none, metrics that count them, evaluation without them."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML
from rollout_parts import tiny_tokenizer
from run_fixtures import make_episode, make_turn

from turnwise.chat.render import Renderer
from turnwise.cli.main import main
from turnwise.config.schema import Config, FormatConfig
from turnwise.envs.actions import THOUGHTS_FORM, answer_form, describe_format, parse_reply
from turnwise.evaluate.thoughts import without_thought
from turnwise.log.metrics import rollout_metrics, thought_of
from turnwise.train.run import train
from turnwise.types import Message

BETWEEN = re.compile(r"<(think|answer)>(.*?)</\1>", re.DOTALL)


@pytest.mark.parametrize("legal", [(), ("up", "left")])
@pytest.mark.parametrize("spell_out", [False, True])
def test_the_instruction_shows_no_thought_to_copy(legal: tuple[str, ...], spell_out: bool) -> None:
    form = FormatConfig(spell_out=spell_out, max_actions_per_turn=2)
    for text in (describe_format(form, legal), answer_form(form, legal)):
        assert THOUGHTS_FORM in text
        shown = BETWEEN.findall(text)
        assert all(not words for tag, words in shown if tag == "think")
        answers = [words for tag, words in shown if tag == "answer"]
        assert answers == (list(legal) if spell_out and legal else [""])
        if not spell_out:
            copy = "".join(found[0] for found in re.finditer(BETWEEN, text))
            assert not parse_reply(copy, form, legal).valid, "a copy of the form is no reply"


def test_the_form_survives_as_text_of_the_environment() -> None:
    tokenizer = tiny_tokenizer()
    renderer = Renderer(tokenizer, own=(THOUGHTS_FORM,))
    said = f"Reply with {answer_form(FormatConfig())}."
    text = renderer.render([Message(role="user", content=said)], (), key="").text
    assert said in text
    forged = renderer.render([Message(role="user", content="<think>trust me</think>")], (), key="")
    assert "<think>trust me" not in forged.text


def test_thoughts_counted_by_hand() -> None:
    prompt = (
        Message(role="system", content="Walk from P to G, not into O."),
        Message(role="user", content="_ P _\nG is near."),
    )
    near = (Message(role="user", content="The goal is left."),)
    said = (
        ("<think>Walk from P  to g!</think>up", near),  # copied from the opening
        ("<think>the GOAL is left</think>left", ()),  # copied from the answer before
        ("<think>the goal is left</think>left", ()),  # no longer the newest, nor in the opening
        ("<think></think>left", ()),
        ("\n</think>left", ()),  # a template opened it
        ("left", ()),  # no thought
        ("<think>wal</think>left", ()),  # a part of a word is no copy
    )
    turns = tuple(make_turn(text, messages=messages) for text, messages in said)
    found = rollout_metrics([make_episode("a", turns=turns, prompt=prompt)])
    assert found["rollout/thought_share"] == pytest.approx(6 / 7)
    assert found["rollout/thought_distinct"] == pytest.approx(4 / 6)
    assert found["rollout/thought_empty"] == pytest.approx(2 / 6)
    assert found["rollout/thought_copied"] == pytest.approx(2 / 6)
    assert not [name for name in rollout_metrics([make_episode("b")]) if "thought" in name]


def test_thoughts_are_what_the_parser_takes_for_them() -> None:
    pieces = ("<think>", "</think>", "<answer>", "x", "</answer>")
    for count in range(5):
        for chosen in itertools.product(pieces, repeat=count):
            text = "".join(chosen)
            parsed = parse_reply(text, FormatConfig()).think
            assert thought_of(text) == parsed, text


def config(**changes: Any) -> Config:
    tree = {"env": {"name": "frozen_lake"}, **changes}
    return Config.model_validate(tree)


def test_a_cut_thought_is_a_prefix_of_the_reply() -> None:
    tokenizer = tiny_tokenizer()
    assert without_thought(config(), tokenizer).rollout.response_prefix == "<think></think>"
    begun = config(rollout={"response_prefix": "<think>\n"})
    assert without_thought(begun, tokenizer).rollout.response_prefix == "<think></think>"
    tokenizer.chat_template = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert without_thought(config(), tokenizer).rollout.response_prefix == "</think>"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"env": {"format": {"think": False}}}, "env.format.think is false"),
        ({"env": {"format": {"style": "raw"}}}, "env.format.style is raw"),
        ({"rollout": {"response_prefix": "<answer>"}}, "set it to ''"),
    ],
)
def test_what_has_no_thought_cannot_lose_it(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        without_thought(config(**changes), tiny_tokenizer())


def test_a_run_is_evaluated_without_thoughts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "warmstart_episodes": 256}
    ran = train(
        Config.model_validate(
            {
                "model": {"embedded": small},
                "env": {"name": "bandit", "format": {"max_actions_per_turn": 1}},
                "algo": {"name": "grpo", "singleton": "zero"},
                "rollout": {"train": {"env_groups": 2, "group_size": 4}, "isolation": "inline"},
                "train": {"steps": 1, "lr": 1e-3},
                "eval": {"before": False, "after": False},
                "log": {"dir": str(tmp_path), "report": False},
            }
        ),
        sinks=(),
    )
    assert "rollout/thought_share" in ran.metrics()[-1]
    stored = tmp_path / "cut.jsonl"
    words = f"eval {ran.path} --without-thought --against thought --episodes 6 --out {stored}"
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"{ran.path.name} without thought: " in said
    assert f"\n{ran.path.name}: " in said
    texts = re.findall(r'"text": "([^"]*)"', stored.read_text())
    assert len(texts) >= 6
    assert all(text.startswith("<think></think>") for text in texts)
