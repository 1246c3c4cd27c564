"""Parts of the verl backend that need no Ray: which rows go on, rewards on tokens, generators, the
hf server."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from verl.utils.metric import Metric
from verl_parts import run_python, tiny_folder

from turnwise.algos.table import PRESETS, build_algorithm
from turnwise.config.schema import Config, EnvConfig, RolloutConfig
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.evaluate.evaluation import Outcome
from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.integrations.verl.config.contract import CONTRACT, check_contract
from turnwise.integrations.verl.config.require import VerlUnavailableError
from turnwise.integrations.verl.engines import patches
from turnwise.integrations.verl.rollout.agent_loop import (
    SAMPLED,
    SingleEpisodeProxy,
    episode_outputs,
)
from turnwise.integrations.verl.rollout.generator import ServerEngine, ServerGenerator
from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer
from turnwise.integrations.verl.trainer.evaluation import judge
from turnwise.integrations.verl.trainer.pace import Pace, PacedTrainingWorker, Pacer, check_paced
from turnwise.integrations.verl.trainer.selection import (
    bare_rewards,
    broken_groups,
    rewards_on_tokens,
    step_metrics,
)
from turnwise.integrations.verl.trainer.state import RunState
from turnwise.integrations.verl.trainer.updates import PacedTrainer
from turnwise.rollout.sync import BatchRequest
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.train.step import credited
from turnwise.types import Completion, Episode, Sample, Status, Task, Turn

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
def test_which_groups_are_too_small(
    rollout: dict[str, Any], sizes: tuple[int, ...], broken: set[int]
) -> None:
    assert broken_groups(_members(*sizes), RolloutConfig(**rollout)) == broken


def test_failures_are_counted_and_are_no_rewards() -> None:
    played = {"row": 0, "tag": "x", "success": 1.0, "attempts": 2, "reward": 3.0, "turns": 2}
    second_context = {**played, "row": 1}
    failed = [
        {"status": "env_error", "attempts": 3},
        {"status": "env_error", "attempts": 1},
        {"status": "worker_error"},
    ]
    metrics = step_metrics([played, second_context], failed, refilled=1)
    assert metrics["rollout/reward"] == 3.0
    assert metrics["rollout/episodes"] == 1
    assert metrics["rollout/contexts"] == 2
    assert metrics["rollout/failures"] == 3
    assert metrics["rollout/failures/env_error"] == 2
    assert metrics["rollout/retries"] == 3, "those of failed episodes count, as natively"
    assert metrics["rollout/refilled_groups"] == 1


def _episode(name: str, group: int, *parts: dict[str, float]) -> Episode:
    said = Completion(ids=(7, 8), logprobs=(-1.0, -1.0), finish_reason="stop")
    turns = tuple(
        Turn(
            prompt_ids=(1, 2),
            completion=said,
            text="up",
            restart=number == 0,
            reward=sum(each.values()),
            reward_parts=each,
        )
        for number, each in enumerate(parts)
    )
    return Episode(
        id=name,
        task=Task(id="t", seed=1),
        group_id=group,
        index=0,
        tag="lake",
        seed=9,
        noise_seed=8,
        prompt=(),
        turns=turns,
        status=Status.COMPLETED,
    )


@pytest.mark.parametrize("cost", [0.0, -0.25])
def test_penalties_alone_give_nothing_as_in_a_native_run(cost: float) -> None:
    ok, bad = {"env": cost}, {"env": cost, "format": -0.1}
    episodes = [
        *(_episode("a", 0, ok, bad), _episode("b", 0, bad, bad)),
        *(_episode("c", 1, ok, {"env": 1.0}), _episode("d", 1, bad)),
    ]
    outputs = [out for one in episodes for out in episode_outputs(one, validate=False, store=False)]
    infos = [out.extra_fields["turnwise"] for out in outputs]

    def batch(played: Sequence[Episode]) -> Batch:
        return collate([sample for one in played for sample in episode_to_samples(one)])

    rewards, groups = bare_rewards(batch(episodes), infos)
    native, found = credited(episodes, PRESETS["grpo"])
    assert groups == found["group/penalty_only"] == 1.0
    torch.testing.assert_close(rewards, batch(native).rewards, rtol=0, atol=0)
    assert rewards[:2].sum(-1).tolist() == [2 * cost] * 2


def test_verl_trains_on_no_turn_that_is_not_to_be_trained_on() -> None:
    whole = _episode("a", 0, {"env": 1.0}, {"env": 0.0})
    heard, unread = whole.turns
    episode = replace(whole, turns=(heard, replace(unread, trained=False)))
    (output,) = episode_outputs(episode, validate=False, store=False)
    fields = output.as_dict()
    assert fields["response_mask"].tolist() == [1, 1, 0, 0, 0, 0]
    assert fields[SAMPLED].tolist() == [1, 1, 0, 0, 1, 1]


def test_an_episode_that_heard_nothing_of_success_failed() -> None:
    won = {"row": 0, "tag": "x", "success": 1.0, "attempts": 1, "reward": 1.0, "turns": 2}
    unheard = {**won, "success": None}
    metrics = step_metrics([won, unheard, unheard, unheard], [], refilled=0)
    assert metrics["rollout/success"] == 0.25
    outcomes = [
        Outcome(
            task_id=str(n),
            index=n,
            tag="x",
            success=True if n == 0 else None,
            reward=0.0,
            turns=1,
            status="completed",
        )
        for n in range(4)
    ]
    result = judge(outcomes, failures=0)
    assert result.success is not None
    assert result.success.estimate == 0.25


def test_a_new_value_head_starts_at_zero_and_a_stored_one_is_kept(tmp_path: Path) -> None:
    import verl.utils.model as target
    from transformers import AutoConfig

    patches.patch_value_head()
    folder = tiny_folder(tmp_path)
    settings = AutoConfig.from_pretrained(folder, num_labels=1)

    def loaded(where: Path) -> torch.nn.Module:
        return target.load_valuehead_model(str(where), torch.float32, settings, False)

    critic = loaded(folder)
    assert critic.score.weight.abs().max() == critic.score.bias.abs().max() == 0
    assert critic.model.embed_tokens.weight.abs().max() > 0
    torch.nn.init.ones_(critic.score.weight)
    critic.save_pretrained(tmp_path / "critic")
    assert loaded(tmp_path / "critic").score.weight.min() == 1


def test_a_device_is_chosen_before_anything_imports_verl() -> None:
    code = """
import os
from turnwise.integrations.verl.faults.cluster import use_device
use_device("cpu")
from verl.plugin.platform import get_platform
print("on", get_platform().device_name, "plugin", os.environ["VERL_USE_EXTERNAL_MODULES"])
"""
    outcome = run_python(code)
    assert "on cpu plugin turnwise.integrations.verl.engines.plugin" in outcome.text, outcome.text


def test_logprobs_in_blocks_equal_a_plain_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "LOGPROB_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    plain = torch.log_softmax(logits.float(), dim=-1).gather(-1, labels[..., None])[..., 0]
    (expected,) = torch.autograd.grad(plain.square().sum(), logits)
    found = patches.logprobs_in_blocks(logits, labels)
    (gradient,) = torch.autograd.grad(found.square().sum(), logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(gradient, expected)


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

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> _Answer:
        self.asked.append((request_id, prompt_ids, sampling_params))
        return self.answer


def _generator(client: _Client, engine: str = "vllm") -> ServerGenerator:
    return ServerGenerator(
        client, engine=engine, max_context=20, stop_ids=frozenset({2}), tokenizer=tiny_tokenizer()
    )


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
        done = asyncio.run(
            _generator(client).generate(Session(key="a", seed=0), [1], Sampling(max_tokens=4))
        )
        assert done.finish_reason == reason


def test_a_reply_that_ends_by_a_stop_string_at_its_limit() -> None:
    ids = tiny_tokenizer().encode("a</b>")
    client = _Client(_Answer(ids, [-1.0] * len(ids)))
    sampling = Sampling(max_tokens=len(ids), stop=("</b>",))
    done = asyncio.run(_generator(client).generate(Session(key="a", seed=0), [1], sampling))
    assert done.finish_reason == "stop"
    assert client.asked[0][2]["stop"] == ["</b>"]


def test_sglang_never_fills_a_contexts_last_place() -> None:
    """verl's server cuts the limit there, and a reply that it ended would look like one that the
    model ended"""
    client = _Client(_Answer([5, 5], [-1.0, -1.0]))
    generator = _generator(client, "sglang")
    done = asyncio.run(
        generator.generate(Session(key="a", seed=0), [1] * 17, Sampling(max_tokens=4))
    )
    assert (generator.max_context, client.asked[0][2]["max_tokens"], done.finish_reason) == (
        19,
        2,
        "length",
    )
    with pytest.raises(ContextOverflowError):
        asyncio.run(generator.generate(Session(key="b", seed=0), [1] * 19, Sampling(max_tokens=4)))


def test_sglang_gets_stop_strings_as_expressions() -> None:
    client = _Client(_Answer([5, 2], [-1.0, -1.0]))
    sampling = Sampling(max_tokens=4, stop=("</a>", "(?)"))
    asyncio.run(_generator(client, "sglang").generate(Session(key="a", seed=0), [1], sampling))
    assert client.asked[0][2]["stop_regex"] == ["</a>", r"\(\?\)"]
    assert "stop" not in client.asked[0][2]


@pytest.mark.parametrize(
    "answer",
    [_Answer([], []), _Answer([1], None), _Answer([1, 2], [-1.0]), _Answer([1], [-1.0], "aborted")],
)
def test_half_an_answer_is_an_error(answer: _Answer) -> None:
    with pytest.raises(GeneratorError):
        asyncio.run(
            _generator(_Client(answer)).generate(
                Session(key="a", seed=0), [1], Sampling(max_tokens=4)
            )
        )


def test_the_batch_engine_keeps_a_session_on_its_server() -> None:
    client = _Client(_Answer([5, 2], [-0.5, -0.25]))
    engine = ServerEngine(_generator(client))
    sampling = Sampling(max_tokens=4)
    requests = [
        BatchRequest(session=Session(key=key, seed=1), ids=(1, 2), new_ids=(2,), sampling=sampling)
        for key in ("a", "b")
    ]
    engine.generate_sequences(requests)
    engine.generate_sequences(requests[:1])
    engine.close()
    assert client.asked[0][0] == client.asked[2][0] != client.asked[1][0]


def test_the_hf_server_continues_sessions_and_takes_weights(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.workers.config import RolloutConfig as VerlRolloutConfig

    from turnwise.integrations.verl.engines.hf_server import HFServer, buckets, to_wire
    from turnwise.testing.tiny import tiny_model

    folder = tiny_folder(tmp_path)
    config = VerlRolloutConfig(
        name="hf",
        prompt_length=32,
        response_length=32,
        max_model_len=64,
        dtype="float32",
        max_num_seqs=4,
    )
    model = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": str(folder)})
    server = HFServer(config, model)
    params = {"max_tokens": 4, "temperature": 1.0, "turnwise_session": "s", "turnwise_seed": 5}

    async def play() -> tuple[list[int], list[int], list[int], list[int]]:
        first = await server.generate([1, 2, 3], dict(params), "r")
        ids = [1, 2, 3, *first.token_ids, 9]
        second = await server.generate(ids, dict(params), "r")
        await server.release("s")
        # Another server, or an evicted session.
        again = await server.generate(ids, dict(params), "r")
        await server.release("s")
        other = tiny_model("qwen2", hidden_size=64, seed=1).state_dict()
        wired = [(name, to_wire(tensor, torch.float32)) for name, tensor in other.items()]
        parts = list(buckets(wired, limit=20_000))
        assert len(parts) > 2
        for index, (part, last) in enumerate(parts):
            await server.load_weights(part, first=index == 0, last=last, global_steps=7)
        held = server._model.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in other.items())
        changed = await server.generate([1, 2, 3], dict(params), "r")
        assert changed.extra_fields["global_steps"] == 7
        return first.token_ids, second.token_ids, again.token_ids, changed.token_ids

    first, second, again, changed = asyncio.run(play())
    assert second == again
    assert first != changed
    with pytest.raises(ValueError, match="no weights for"):
        asyncio.run(server.load_weights({}, first=True, last=True, global_steps=8))
    nobody = {"nobody.weight": to_wire(torch.zeros(1), torch.float32)}
    with pytest.raises(ValueError, match="does not have"):
        asyncio.run(server.load_weights(nobody, first=True, last=True, global_steps=8))


def test_weights_travel_in_the_engines_type() -> None:
    from turnwise.integrations.verl.engines.hf_server import from_wire, to_wire

    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        wired = to_wire(weights.T, dtype)
        wired.setflags(write=False)  # as it arrives from shared memory
        assert torch.equal(from_wire(wired, dtype), weights.T.to(dtype))
    wired = to_wire(weights, torch.float32)
    weights.zero_()
    assert from_wire(wired, torch.float32).abs().sum() > 0


class _Engine:
    """Shaped like one of verl's: every update moves the one weight by the learning rate, and the KL
    by 0.01."""

    def __init__(self, lr: float) -> None:
        self.module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=lr)
        self.optimizer_config = SimpleNamespace(lr=lr)
        self.kl = 0.0

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> dict[str, Any]:
        self.module.weight.grad = torch.tensor([[-1.0]])
        # Their mean by weight is the KL.
        micro_batches = [
            (self.kl - 0.001, 1.0),
            (3 * (self.kl + 0.001 / 3), 3.0),
        ]
        sums = [Metric(aggregation="mean") for _ in range(2)]
        for index, total in enumerate(sums):
            total.extend([part[index] for part in micro_batches])
        return {"metrics": {"actor/kl_sum": sums[0], "actor/kl_weight": sums[1], "loss": 1.0}}

    def optimizer_step(self) -> float:
        self.optimizer.step()
        self.kl += 0.01
        return 1.0

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def get_data_parallel_group(self) -> None:
        return None


def _updates(engine: _Engine, pacer: Pacer, pace: Pace, mini_batches: int) -> list[dict[str, Any]]:
    """The metrics of the mini-batches that were looked at."""
    seen: list[dict[str, Any]] = []
    for _ in range(mini_batches):
        if pacer.begin(pace):
            found = engine.forward_backward_batch({}, None)
            engine.optimizer_step()
            seen.append(found["metrics"])
    return seen


def test_updates_end_where_the_policy_has_moved_far_enough() -> None:
    engine = _Engine(0.5)
    pacer = Pacer(engine)
    seen = _updates(engine, pacer, Pace(step=1, factor=0.1, target_kl=0.015), 6)
    # KL 0 and 0.01 before the first two updates; 0.02 before the third, which is not made, nor any
    # after it
    assert [row["updates/max"].aggregate() for row in seen] == [1.0, 2.0, 2.0]
    assert [row["kl_stop/max"].aggregate() for row in seen] == [0.0, 0.0, 1.0]
    assert [sorted(row) for row in seen] == [["kl_stop/max", "loss", "updates/max"]] * 2 + [
        ["kl_stop/max", "updates/max"]
    ]
    assert engine.module.weight.item() == pytest.approx(2 * 0.5 * 0.1)
    engine.kl = 0.0
    # The next step begins anew.
    assert len(_updates(engine, pacer, Pace(step=2, target_kl=0.015), 6)) == 3


def test_the_first_update_is_always_made_and_a_critic_makes_as_many() -> None:
    engine = _Engine(1.0)
    engine.kl = 9.0
    pacer = Pacer(engine)
    assert len(_updates(engine, pacer, Pace(step=1, target_kl=0.1), 4)) == 2
    assert engine.module.weight.item() == 1.0
    assert len(_updates(engine, pacer, Pace(step=2, max_updates=3), 4)) == 3
    assert engine.module.weight.item() == 4.0


def test_workers_of_a_users_own_must_keep_the_pace() -> None:
    import ray
    from verl.trainer.ppo.utils import Role
    from verl.workers.engine_workers import TrainingWorker

    check_paced({Role.Critic: ray.remote(PacedTrainingWorker)}, asked=["train.schedule"])
    check_paced({Role.Critic: ray.remote(TrainingWorker)}, asked=[])
    with pytest.raises(
        ValueError,
        match=r"gives Critic the class TrainingWorker, which does not honour train.schedule",
    ):
        check_paced(
            {Role.Critic: ray.remote(TrainingWorker)}, asked=["train.schedule", "train.target_kl"]
        )


def test_the_state_of_a_run_survives(tmp_path: Path) -> None:
    config = Config(
        algo={"kl_coef": 0.1, "kl_target": 0.02},
        env={"name": "bandit", "shaping": {"normalize": "running"}},
    )
    algorithm = build_algorithm(config.algo)
    state = RunState(config, algorithm)
    state.adapt_kl(0.5, num_episodes=500)
    state.normalizer(_batch(), ["bandit"])
    state.still.idle = 2
    state.save(tmp_path / "global_step_3")
    again = RunState(config, algorithm)
    again.load(tmp_path / "global_step_3")
    assert again.kl == state.kl != RunState(config, algorithm).kl
    assert again.normalizer.state_dict() == state.normalizer.state_dict()
    assert again.still.idle == 2
    with pytest.raises(ValueError, match=r"turnwise.json is missing"):
        again.load(tmp_path)


def test_the_names_that_we_reach_into_are_there() -> None:
    check_contract()


def test_a_verl_that_changed_is_refused_with_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method is gone, and another takes something else"""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.delattr(PPOTrainer, "_balance_batch")
    monkeypatch.setattr(PPOTrainer, "_compute_values", lambda self, meta: meta)
    with pytest.raises(VerlUnavailableError) as caught:
        AgentTrainer({})
    said = str(caught.value)
    assert "PPOTrainer._balance_batch: is gone (failed episodes" in said
    assert "_compute_values: takes ('self', 'meta'), expected ('self', 'batch', 'metrics')" in said
    assert said.count("PPOTrainer") == 2


def test_every_private_method_is_in_the_contract() -> None:
    """What AgentTrainer overrides of verl's trainer, it says why"""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    ours = [reach.where for reach in CONTRACT if "trainer_base:PPOTrainer" in reach.where]
    named = {where.rpartition(".")[2] for where in ours}
    methods = {name for name, value in vars(PPOTrainer).items() if callable(value)}
    private = {name for name in methods if name.startswith("_") and name[1] != "_"}
    own = {name for cls in (AgentTrainer, PacedTrainer) for name in vars(cls)}
    assert own & private == named


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_verls_own_trainers_do_not_take_our_config(mode: str) -> None:
    """They would train without our credit, filters and records"""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls

    config = OmegaConf.create({"turnwise": {"config": "frozen_lake"}})
    with pytest.raises(ValueError, match=r" trainer\.v1\.trainer_mode: turnwise") as caught:
        get_trainer_cls(mode)(config)
    assert "no asynchronous trainer" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer"),
        ("verl.experimental.one_step_off_policy.ray_trainer", "OneStepOffRayTrainer"),
    ],
)
def test_verls_older_trainers_do_not_take_our_config(module: str, name: str) -> None:
    """one_step_off has a trainer and a command of its own"""
    from importlib import import_module

    from omegaconf import OmegaConf

    config = OmegaConf.create({"turnwise": {"config": "frozen_lake"}})
    with pytest.raises(ValueError, match=rf"{name} is verl's own trainer.*one_step_off_policy"):
        getattr(import_module(module), name)(config, None, {}, None)


BROKEN = """
import threading

from turnwise.types import Task

class Broken:
    def reset(self, task, noise_seed=0):
        raise NotImplementedError

    step = finish = reset

    def close(self):
        pass

class Stuck(Broken):
    max_turns = None

    def make_task(self, seed, split):
        threading.Event().wait()

class Unbounded(Broken):
    asked = False

    @property
    def max_turns(self):
        if self.asked:
            raise SystemExit("no more")

    def make_task(self, seed, split):
        self.asked = True
        return Task(id="one", seed=seed)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Stuck", "make_task took longer than 0.3 s"),
        ("Unbounded", "max_turns raised SystemExit: no more"),
    ],
)
def test_an_environment_that_breaks_in_a_plan_ends_its_episodes(
    tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    rollout = RolloutConfig(isolation="inline", reset_timeout=0.3)
    env = EnvConfig(name=f"{tmp_path / 'broken.py'}:{name}")
    generator: Any = SimpleNamespace(max_context=100)
    loop = SingleEpisodeProxy(
        Config(env=env, rollout=rollout), generator, tiny_tokenizer(), split="train", section={}
    )
    plans = [loop.plan(0, member, step=0) for member in range(2)]
    for plan in plans:
        assert (plan.error or "").startswith(f"{env.name}: {told}")
    loop.close()
