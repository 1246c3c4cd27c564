"""The lockstep rollout plays the same episodes as AgentProxy, through either kind of engine."""

from collections.abc import Sequence

import pytest
from rollout_parts import CountEnv, Faulty, config_for, raises, says

from turnwise.rollout.agents import Agent, agent_class, register_agent
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.sync import BatchRequest, SyncMultiTurnRollout
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Completion, Message


class EchoEngine:
    """A batch engine without sessions: it must be given whole contexts."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.seen: list[str] = []
        self._tokenizer = tiny_tokenizer()

    @property
    def max_context(self) -> int:
        return 1000

    def generate_sequences(self, requests: Sequence[BatchRequest]) -> Sequence[Completion]:
        self.batches.append(len(requests))
        self.seen = [self._tokenizer.decode(list(request.ids)) for request in requests]
        ids = tuple(self._tokenizer.encode("go<|im_end|>"))
        return [
            Completion(ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop") for _ in requests
        ]


def lockstep(engine, *, config=None, factory=CountEnv, **options) -> SyncMultiTurnRollout:
    config = config or config_for()
    return SyncMultiTurnRollout(
        engine, config, tiny_tokenizer(), factories={"count": factory}, **options
    )


def test_same_ids_as_the_async_rollout() -> None:
    rollout = lockstep(says())
    states = rollout.rollout()
    proxy = AgentProxy(config_for(), says(), tiny_tokenizer(), factories={"count": CountEnv})
    played = proxy.play(0).episodes
    ours = rollout.episodes()
    assert [e.id for e in ours] == [e.id for e in played]
    for left, right in zip(ours, played, strict=True):
        assert [t.prompt_ids + t.completion.ids for t in left.turns] == [
            t.prompt_ids + t.completion.ids for t in right.turns
        ]
        assert left.final_ids == right.final_ids
    assert all(state["done"] for state in states)
    batch = rollout.build_update_batch()
    assert batch.num_rows == 4
    assert batch.response_mask.sum() == 4 * 3 * 3
    rollout.close()


def test_one_call_per_turn_with_whole_contexts() -> None:
    engine = EchoEngine()
    rollout = lockstep(engine)
    rollout.reset()
    rollout.rollout()
    assert engine.batches == [4, 4, 4]
    assert all(
        text.startswith("<|im_start|>system\nCount.") and "2 of 3" in text for text in engine.seen
    )
    rollout.reset()
    rollout.rollout()
    assert rollout.env_state.num_resets == 2
    assert rollout.episodes()[0].id.startswith("train-000001")


def test_env_outputs_have_the_documented_shape() -> None:
    manager = EnvStateManager(config_for(max_turn=2), factories={"count": CountEnv})
    outputs = manager.reset()
    assert [o["env_id"] for o in outputs] == [0, 1, 2, 3]
    assert [o["group_id"] for o in outputs] == [0, 0, 1, 1]
    assert {o["tag"] for o in outputs} == {"count"}
    assert all(o["penalty"] == 0.0 and len(o["history"]) == 1 for o in outputs)
    assert outputs[0]["history"][0]["actions_left"] == 2
    assert manager.get_rollout_states() == outputs


def test_failing_environment_leaves_the_lockstep_group() -> None:
    counter = [0]
    rollout = lockstep(
        says(),
        config=config_for(groups=1, size=3),
        factory=lambda: Faulty(raises, counter, times=1),
    )
    rollout.rollout()
    assert len(rollout.episodes()) == 2
    assert [s["status"] for s in rollout.env_state.get_rollout_states()].count("env_error") == 1
    assert rollout.build_update_batch().num_rows == 2


def test_context_overflow_in_lockstep() -> None:
    rollout = lockstep(says(), config=config_for(max_context=100))
    rollout.rollout()
    assert {episode.status.value for episode in rollout.episodes()} == {"truncated_length"}


@register_agent("test-shouting")
class Shouting(Agent):
    def observe(self, messages: Sequence[Message]) -> Sequence[Message]:
        return [Message(role=message.role, content=message.content.upper()) for message in messages]

    def act(self, text: str) -> str:
        return text.lower()


def test_custom_agent_changes_what_is_shown_and_never_the_tokens() -> None:
    rollout = lockstep(says("GO"), agent_cls=agent_class("test-shouting"))
    rollout.rollout()
    episode = rollout.episodes()[0]
    assert episode.prompt[0].content == "COUNT."
    assert episode.reward == 3.0  # the environment was given "go"
    assert tiny_tokenizer().decode(list(episode.turns[0].completion.ids)) == "GO<|im_end|>"


def test_unknown_agent_and_processor_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'test-shouting'"):
        agent_class("test-shoutin")
    with pytest.raises(ValueError, match="text only"):
        lockstep(says(), processor=object())
