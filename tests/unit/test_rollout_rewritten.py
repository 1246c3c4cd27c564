"""An environment that rewrites the conversation: a new context, in every kind of rollout."""

import asyncio
import json

import pytest
from rollout_parts import CountEnv, config_for, says

from turnwise.data.samples import episode_to_samples
from turnwise.envs.base import EnvError
from turnwise.envs.gate import admit_result
from turnwise.envs.wire import result_from_json, result_to_json
from turnwise.evaluate.players import Situation, player_proxy
from turnwise.log.export import conversations
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Episode, Message, Observation, StepResult

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
NOTES = (
    Message(role="user", content="So far you said:"),
    Message(role="assistant", content="GO!"),
    Message(role="user", content="And now?"),
)


class Rewrites(CountEnv):
    """Puts its own account in the place of what was said after the first turn."""

    def step(self, message: Message) -> StepResult:
        result = super().step(message)
        if self.count != 1:
            return result
        rewritten = Observation(messages=NOTES, tools=(TOOL,))
        return StepResult(messages=NOTES[-1:], reward=result.reward, rewritten=rewritten)


def played(**rollout) -> Episode:
    config = config_for(groups=1, size=1, **rollout)
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories={"count": Rewrites})
    try:
        (episode,) = proxy.play(0).episodes
        return episode
    finally:
        proxy.close()


def check(episode: Episode) -> None:
    assert [turn.restart for turn in episode.turns] == [True, True, False]
    first, second = episode_to_samples(episode)
    decode = tiny_tokenizer().decode
    assert "Count." in decode(first.ids)
    assert decode(first.ids).endswith("assistant\ngo<|im_end|>")
    text = decode(second.ids)
    assert "Count." not in text
    assert "<|im_start|>assistant\nGO!<|im_end|>" in text
    assert text.index("GO!") < text.index("And now?") < text.index("2 of 3")
    said = [i for i, ours in zip(second.ids, second.response_mask, strict=True) if ours]
    assert decode(said) == "go<|im_end|>" * 2


def test_what_the_environment_rewrote_begins_a_context():
    episode = played()
    check(episode)
    assert Episode.from_json(json.loads(json.dumps(episode.to_json()))) == episode


def test_in_a_thread():
    check(played(isolation="thread", num_workers=1))


def test_in_lockstep():
    rollout = SyncMultiTurnRollout(
        says(), config_for(groups=1, size=1), tiny_tokenizer(), factories={"count": Rewrites}
    )
    try:
        rollout.rollout()
        (episode,) = rollout.episodes()
        check(episode)
    finally:
        rollout.close()


def test_across_a_boundary():
    result = StepResult(messages=NOTES[-1:], reward=0.5, rewritten=Observation(messages=NOTES))
    assert result_from_json(json.loads(json.dumps(result_to_json(result)))) == result


def test_the_model_must_be_able_to_answer_it():
    broken = StepResult(messages=(), reward=0.0, rewritten=Observation(messages=NOTES[:2]))
    with pytest.raises(EnvError, match="rewritten conversation: the opening must end"):
        admit_result(broken, name="env")


def test_a_cut_right_after_it_values_no_state():
    episode = played(max_turn=1)
    assert len(episode.turns) == 1
    assert episode.final_ids == ()


def test_players_read_it():
    class Keeps:
        name = "keeps"

        def __init__(self) -> None:
            self.seen: list[Situation] = []

        async def reply(self, situation: Situation) -> Message:
            self.seen.append(situation)
            return Message(role="assistant", content="go")

    player = Keeps()
    proxy = player_proxy(
        config_for(groups=1, size=1), player, split="train", factories={"count": Rewrites}
    )
    try:
        asyncio.run(proxy.rollout(0))
    finally:
        proxy.close()
    assert player.seen[0].tools == ()
    assert player.seen[1].messages == NOTES
    assert player.seen[1].tools == (TOOL,)
    assert [m.content for m in player.seen[2].messages[:4]] == [
        "So far you said:",
        "GO!",
        "And now?",
        "go",
    ]


def test_each_context_is_a_conversation_to_learn_from():
    first, second = conversations(played())
    assert [m["content"] for m in first["messages"]][-1] == "go"
    assert "tools" not in first
    assert [m["content"] for m in second["messages"]][:4] == [
        "So far you said:",
        "GO!",
        "And now?",
        "go",
    ]
    assert second["tools"] == [TOOL]
