"""Parts of the verl backend that need no Ray: which rows go on, rewards on tokens, generators, the hf server."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from verl_parts import tiny_folder

from turnwise.config.schema import RolloutConfig
from turnwise.data.batch import Batch, collate
from turnwise.generate.base import GeneratorError, Sampling, Session
from turnwise.integrations.verl.generator import ServerEngine, ServerGenerator
from turnwise.integrations.verl.selection import broken_groups, rewards_on_tokens, step_metrics
from turnwise.rollout.sync import Request
from turnwise.types import Sample

pytestmark = pytest.mark.verl


def _members(*sizes: int) -> list[dict[str, Any]]:
    return [{"group": group} for group, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("rollout", "sizes", "broken"),
    [
        ({"train": {"group_size": 4}}, (4, 2, 1), {2}),
        ({"train": {"group_size": 4}, "on_failure": "drop_group"}, (4, 3, 1), {1, 2}),
        ({"train": {"group_size": 1}}, (1, 1), set()),
        ({"train": {"group_size": 4}, "min_group_size": 3}, (4, 3, 2), {2}),
    ],
)
def test_which_groups_are_too_small(rollout: dict[str, Any], sizes: tuple[int, ...], broken: set[int]) -> None:
    assert broken_groups(_members(*sizes), RolloutConfig(**rollout)) == broken


def test_failures_are_counted_and_are_no_rewards() -> None:
    played = {"row": 0, "success": 1.0, "attempts": 2, "reward": 3.0, "turns": 2}
    second_context = {**played, "row": 1}
    failed = [{"status": "env_error"}, {"status": "env_error"}, {"status": "env_timeout"}]
    metrics = step_metrics([played, second_context], failed, refilled=1)
    assert metrics["rollout/reward"] == 3.0
    assert metrics["rollout/episodes"] == 1
    assert metrics["rollout/contexts"] == 2
    assert metrics["rollout/failures"] == 3
    assert metrics["rollout/failures/env_error"] == 2
    assert metrics["rollout/refilled_groups"] == 1


def _batch() -> Batch:
    sample = Sample(
        ids=(1, 2, 7, 8, 3, 9, 4),
        response_mask=(False, False, True, True, False, True, False),
        loss_mask=(False, False, True, True, False, True, False),
        logprobs=(0.0,) * 7,
        turn_ids=(-1, -1, 0, 0, -1, 1, -1),
        rewards=(0.0,) * 7,
        state_keys={0: "a", 1: "b"},
        episode_id="e",
        group_id=0,
        truncated=True,
    )
    return collate([sample])


def test_rewards_of_a_user_land_on_sampled_tokens() -> None:
    assert rewards_on_tokens(_batch(), torch.tensor([2.0])).tolist() == [[0, 0, 0, 0, 0, 2.0, 0]]
    per_token = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert rewards_on_tokens(_batch(), per_token).tolist() == [[0, 0, 1.0, 2.0, 0, 4.0, 0]]
    with pytest.raises(ValueError, match="one reward per row"):
        rewards_on_tokens(_batch(), torch.zeros(3))


@dataclass
class _Answer:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"global_steps": 4})


class _Client:
    """Answers like one of verl's clients, and remembers what it was asked."""

    def __init__(self, answer: _Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> _Answer:
        self.asked.append((request_id, prompt_ids, sampling_params))
        return self.answer


def _generator(client: _Client, engine: str = "vllm") -> ServerGenerator:
    return ServerGenerator(client, engine=engine, max_context=20, stop_ids=frozenset({2}))


def test_a_session_sends_its_whole_context_to_one_server() -> None:
    client = _Client(_Answer([5, 2], [-0.5, -0.25]))
    generator, session = _generator(client), Session(key="a", seed=3)
    first = asyncio.run(generator.generate(session, [1, 1], Sampling(max_tokens=4)))
    asyncio.run(generator.generate(session, [9], Sampling(max_tokens=40)))
    assert (first.ids, first.logprobs, first.finish_reason) == ((5, 2), (-0.5, -0.25), "stop")
    assert first.policy_version == 4
    assert client.asked[1][1] == [1, 1, 5, 2, 9]
    assert client.asked[0][0] == client.asked[1][0]
    assert client.asked[1][2]["max_tokens"] == 15  # what is left of the context


def test_finish_reasons_of_other_engines() -> None:
    for ids, reason in (([5, 5, 5, 5], "length"), ([5, 5, 5, 2], "stop"), ([5, 5], "stop")):
        client = _Client(_Answer(ids, [-1.0] * len(ids)))
        done = asyncio.run(_generator(client).generate(Session(key="a", seed=0), [1], Sampling(max_tokens=4)))
        assert done.finish_reason == reason


@pytest.mark.parametrize(
    "answer", [_Answer([], []), _Answer([1], None), _Answer([1, 2], [-1.0]), _Answer([1], [-1.0], "aborted")]
)
def test_half_an_answer_is_an_error(answer: _Answer) -> None:
    with pytest.raises(GeneratorError):
        asyncio.run(_generator(_Client(answer)).generate(Session(key="a", seed=0), [1], Sampling(max_tokens=4)))


def test_the_batch_engine_keeps_a_session_on_its_server() -> None:
    client = _Client(_Answer([5, 2], [-0.5, -0.25]))
    engine = ServerEngine(_generator(client))
    sampling = Sampling(max_tokens=4)
    requests = [
        Request(session=Session(key=key, seed=1), ids=(1, 2), new_ids=(2,), sampling=sampling) for key in ("a", "b")
    ]
    engine.generate_sequences(requests)
    engine.generate_sequences(requests[:1])
    engine.close()
    assert client.asked[0][0] == client.asked[2][0] != client.asked[1][0]


def test_the_hf_server_continues_sessions_and_takes_weights(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.workers.config import RolloutConfig as VerlRolloutConfig

    from turnwise.integrations.verl.hf_server import HFServer
    from turnwise.testing.tiny import tiny_model

    folder = tiny_folder(tmp_path)
    config = VerlRolloutConfig(
        name="hf", prompt_length=32, response_length=32, max_model_len=64, dtype="float32", max_num_seqs=4
    )
    model = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": str(folder)})
    server = HFServer(config, model)
    params = {"max_tokens": 4, "temperature": 1.0, "turnwise_session": "s", "turnwise_seed": 5}

    async def play() -> tuple[list[int], list[int], list[int], list[int]]:
        first = await server.generate([1, 2, 3], dict(params), "r")
        ids = [1, 2, 3, *first.token_ids, 9]
        second = await server.generate(ids, dict(params), "r")
        await server.release("s")
        again = await server.generate(ids, dict(params), "r")  # another server, or an evicted session
        await server.release("s")
        other = tiny_model("qwen2", hidden_size=64, seed=1).state_dict()
        await server.load_weights(other, 7)
        changed = await server.generate([1, 2, 3], dict(params), "r")
        assert changed.extra_fields["global_steps"] == 7
        return first.token_ids, second.token_ids, again.token_ids, changed.token_ids

    first, second, again, changed = asyncio.run(play())
    assert second == again
    assert first != changed
    with pytest.raises(ValueError, match="no weights for"):
        asyncio.run(server.load_weights({}, 8))
    with pytest.raises(ValueError, match="does not have"):
        asyncio.run(server.load_weights({"nobody.weight": torch.zeros(1)}, 8))
