"""The cycle of EnvStateManager and ContextManager, driven by hand: states to inputs, replies to
states, all states to a batch."""

import pytest
from omegaconf import OmegaConf
from rollout_parts import CountEnv, config_for

from turnwise.rollout.context import ContextManager
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.outputs import LmInput, LmOutput
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Completion


def parts(**settings: object) -> tuple[EnvStateManager, ContextManager]:
    config = config_for(**settings)
    es = EnvStateManager(config, mode="train", factories={"count": CountEnv})
    return es, ContextManager(tiny_tokenizer(), config.rollout, max_context=1000)


def says_go(inputs: list[LmInput]) -> list[LmOutput]:
    ids = tuple(tiny_tokenizer().encode("go<|im_end|>"))
    said = Completion(ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop")
    return [LmOutput(env_id=one.env_id, completion=said) for one in inputs]


def play(es: EnvStateManager, ctx: ContextManager) -> list[LmInput]:
    first = ctx.get_lm_inputs(es.reset())
    inputs = first
    while inputs:
        inputs = ctx.get_lm_inputs(es.step(ctx.get_env_inputs(says_go(inputs))))
    return first


class GoEngine:
    max_context = 1000

    def generate_sequences(self, requests: list[object]) -> list[Completion]:
        ids = tuple(tiny_tokenizer().encode("go<|im_end|>"))
        return [
            Completion(ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop") for _ in requests
        ]


def test_the_cycle_gives_the_batch_of_the_lockstep_rollout() -> None:
    es, ctx = parts(max_turn=2)
    play(es, ctx)
    batch = ctx.formulate_rollouts(es.get_rollout_states())
    again = ctx.formulate_rollouts(es.get_rollout_states())
    rollout = SyncMultiTurnRollout(
        GoEngine(),
        config_for(max_turn=2),
        tiny_tokenizer(),
        factories={"count": CountEnv},
    )
    rollout.rollout()
    expected = rollout.build_update_batch()
    assert expected.num_rows == 4
    firsts = [one.turns[0].generate_start for one in rollout.episodes()]
    assert firsts == [firsts[0]] * 4  # in lockstep all are asked at once
    assert firsts[0] is not None
    for found in (batch, again):
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.response_mask.tolist() == expected.response_mask.tolist()
    es.close()
    rollout.close()


def test_a_new_reset_starts_new_conversations_and_gives_the_old_sessions_back() -> None:
    es, ctx = parts(max_turn=2)
    before = play(es, ctx)
    assert all(one.stale is None for one in before)
    after = ctx.get_lm_inputs(es.reset())
    assert [one.stale for one in after] == [one.session for one in before]
    assert {one.session.key for one in after}.isdisjoint(one.session.key for one in before)
    es.close()


def test_states_that_are_not_over_make_no_batch() -> None:
    es, ctx = parts(max_turn=2)
    ctx.get_lm_inputs(es.reset())
    with pytest.raises(ValueError, match="train-000000-g0-m0 is not over"):
        ctx.formulate_rollouts(es.get_rollout_states())
    es.close()


def test_mode_is_another_word_for_split() -> None:
    settings = {"env": {"name": "bandit"}, "es_manager": {"val": {"env_groups": 3}}}
    es = EnvStateManager(settings, mode="val")
    assert (es.split, len(es.reset())) == ("val", 3)
    es.close()
    hydra = OmegaConf.create(
        {
            "agent_proxy": {"max_turn": 2},
            "es_manager": {
                "train": {
                    "env_groups": 2,
                    "group_size": 3,
                    "env_configs": {
                        "tags": ["Arms"],
                        "n_groups": ["${es_manager.train.env_groups}"],
                    },
                }
            },
            "custom_envs": {"Arms": {"env_type": "bandit"}},
        }
    )
    es = EnvStateManager(hydra, mode="train")  # what Hydra hands to RAGEN's programs
    assert [one["tag"] for one in es.reset()] == ["Arms"] * 6
    es.close()
    with pytest.raises(ValueError, match="contradicts"):
        EnvStateManager(settings, mode="val", split="train")
    with pytest.raises(ValueError, match="train or val, got 'test'"):
        EnvStateManager(settings, mode="test")
