"""`backend: trl`: the native config on TRL, the same loss and gradient, and what is refused by
name."""

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl_parts import ThreeTurns, make_trainer

from turnwise.algos.credit import compute_advantages
from turnwise.algos.losses import policy_loss
from turnwise.algos.reduce import token_weights
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import AlgoConfig, Config, GroupsConfig
from turnwise.data.batch import collate
from turnwise.data.samples import episode_to_samples
from turnwise.envs.registry import make_env
from turnwise.integrations.memory import recomputes
from turnwise.integrations.trl import mapping
from turnwise.integrations.trl.mapping import refuse, trl_arguments
from turnwise.integrations.trl.run import train
from turnwise.log.events import StepDone
from turnwise.log.store import RunReader
from turnwise.models.scoring import head_of, hidden_states, token_scores, trunk_of
from turnwise.rollout.plan import plan_rollout
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.update import TrainingError

pytestmark = pytest.mark.timeout(280)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("window", ["full", "single_turn"])
@pytest.mark.parametrize(
    ("algo", "off_policy"),
    [
        (AlgoConfig(name="grpo"), False),
        (AlgoConfig(name="grpo"), True),
        (AlgoConfig(name="grpo", reduction="token_mean", clip_high=0.28), True),
        (AlgoConfig(name="dr_grpo"), True),
        (AlgoConfig(name="rloo"), True),
        (AlgoConfig(name="reinforce_pp"), True),
        (AlgoConfig(name="gigpo"), True),
        (AlgoConfig(name="hgpo"), True),
        (AlgoConfig(name="gspo"), True),
        (AlgoConfig(name="cispo"), True),
        (AlgoConfig(name="grpo", dual_clip=1.5), True),
    ],
    ids=lambda value: (
        str(value)
        if isinstance(value, bool)
        else f"{value.name}-{value.reduction}-{value.dual_clip}"
    ),
)
def test_same_loss_and_gradient_as_the_native_trainer(tmp_path, algo, off_policy, window):
    """One batch of real episodes, scored by both: TRL's trainer and turnwise's loss."""
    config = Config(
        backend="trl",
        algo=algo,
        rollout={"train": {"env_groups": 3, "group_size": 4}, "max_context": 96},
    )
    algorithm = build_algorithm(algo.model_copy(update={"singleton": "zero"}))
    wanted = (
        "loss_type",
        "epsilon",
        "epsilon_high",
        "delta",
        "importance_sampling_level",
        "credit",
        "beta",
    )
    settings = {
        key: value for key, value in trl_arguments(config, algorithm).items() if key in wanted
    }
    env = ThreeTurns()
    env.stop_early = True  # episodes of two and of three turns
    trainer = make_trainer(
        tmp_path,
        env,
        per_device_train_batch_size=12,
        max_steps=1,
        trainer={"algorithm": algorithm},
        **settings,
    )
    if algorithm.reduction == "token_sum_norm":
        trainer.advantage_scale = trainer.args.max_completion_length / 1024.0
    rollout = trainer.episode_config.rollout.model_copy(update={"window": window})
    trainer.episode_config = trainer.episode_config.model_copy(update={"rollout": rollout})
    trainer.model.train()
    trainer.create_optimizer_and_scheduler(1)
    inputs = [row for number in (0, 1, 2) for row in [trainer.train_dataset[number]] * 4]
    output = trainer._generate_and_score_completions([dict(row) for row in inputs])
    shift = 0.3 if off_policy else 0.0
    noise = shift * torch.randn(
        output["completion_ids"].shape, generator=torch.Generator().manual_seed(0)
    )
    if off_policy:
        output["old_per_token_logps"] = output["sampling_per_token_logps"] + noise
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, output)
    trainer.model.zero_grad()
    loss.backward()
    theirs = gradients(trainer.model)

    trainer.model.zero_grad()
    samples = [sample for row in trainer._rows for sample in episode_to_samples(row.episode)]
    assert len(samples) == len(trainer._all_rows)
    assert (len(samples) > len(trainer._rows)) is (window != "full")
    batch, _ = compute_advantages(collate(samples), algorithm)
    old = batch.logprobs.clone()
    place = {sample: index for index, sample in enumerate(map(sample_key, samples))}
    for index, row in enumerate(trainer._all_rows):
        size = len(row.completion_ids)
        old[place[sample_key(row.sample)], row.start : row.start + size] += noise[index, :size]
    old = old.masked_fill(~batch.response_mask, 0.0)
    batch = batch.replace(old_logprobs=old, weights=token_weights(batch, algorithm))
    hidden = hidden_states(trunk_of(trainer.model), batch)
    logprobs = token_scores(head_of(trainer.model), hidden, batch, temperature=1.0).logprobs
    ours, _ = policy_loss(logprobs, batch, algorithm)
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-5)
    for name, gradient in gradients(trainer.model).items():
        assert torch.allclose(gradient, theirs[name], atol=1e-5), name
    assert any(gradient.abs().max() > 1e-4 for gradient in theirs.values())


def sample_key(sample):
    return sample.episode_id, tuple(sample.state_keys)


def small_config(tmp_path, **changes):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    tree = {
        "backend": "trl",
        "model": {"path": str(tmp_path / "model")},
        "env": {"name": "simple_game", "format": {"think": False}},
        "rollout": {
            "train": {"env_groups": 2, "group_size": 4},
            "max_response_tokens": 8,
            "max_context": 1024,
            "isolation": "inline",
        },
        "algo": {"name": "grpo"},
        "train": {"steps": 2, "max_turn": 3, "lr": 1e-3, "device": "cpu"},
        "eval": {"episodes": 4},
        "log": {"dir": str(tmp_path / "runs"), "name": "a"},
        "checkpoint": {"every": 1},
        **changes,
    }
    return Config.model_validate(tree)


def test_a_run_leaves_a_run_directory_and_resumes(tmp_path):
    config = small_config(tmp_path)
    result = train(config, sinks=[])
    assert result.steps == 2
    assert result.before is not None
    assert result.after is not None
    run = RunReader(result.path)
    assert run.steps() == [1, 2]
    assert len(run.episodes(1)) == 8
    assert (result.checkpoint / "model" / "config.json").is_file()
    assert (result.path / "report.html").is_file()
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})})
    again = train(longer, resume=result.path, sinks=[])
    assert again.steps == 3
    assert RunReader(result.path).steps() == [1, 2, 3]


@pytest.mark.parametrize("program", ["team", "player_first"])
def test_a_program_trains_the_role_that_it_names(tmp_path, program):
    name = f"agent:{Path(__file__).parent}/team.py:{program}"
    env = {"name": name, "options": {"trained_roles": ["player"]}}
    config = small_config(tmp_path, env=env, eval={"before": False, "after": False})
    result = train(config, sinks=[])
    run = RunReader(result.path)
    for step in (1, 2):
        paid = {
            one.id: next(turn.reward for turn in one.turns if turn.role == "player")
            for one in run.episodes(step)
        }
        mean = sum(paid.values()) / len(paid)
        metrics = next(row for row in run.metrics() if row["step"] == step)
        assert metrics["reward"] == pytest.approx(mean), "the judge's reward is not the player's"
        for row in run.credit(step):
            judged = row.sample == (0 if program == "team" else 1)
            assert not (judged and any(row.advantages))
    assert all(entry.sampled == entry.trained and not entry.broken for entry in run.ledger())


def test_the_same_tasks_as_the_native_trainer(tmp_path):
    config = small_config(tmp_path)
    result = train(config, sinks=[])
    plans = plan_rollout(
        config, split="train", step=1, probes={"simple_game": make_env(config.env)}
    )
    played = RunReader(result.path).episodes(2)
    assert [episode.task for episode in played] == [plan.task for plan in plans]


def test_mini_batches_and_epochs(tmp_path):
    config = small_config(
        tmp_path,
        train={"steps": 2, "mini_batches": 2, "epochs": 2, "max_turn": 2, "device": "cpu"},
        eval={"before": False, "after": False},
    )
    result = train(config, sinks=[])
    assert result.steps == 2
    assert RunReader(result.path).steps() == [1, 5]


class Terminated:
    """Sends this process SIGTERM after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def handle(self, event):
        if isinstance(event, StepDone) and event.step == self.update:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self):
        pass


def test_a_run_that_is_stopped_ends_with_a_whole_step_and_goes_on_from_it(tmp_path):
    options = {"rows": 16, "val_fraction": 0.25}
    env = {"name": f"{Path(__file__).parent}/trl_parts.py:ThreeTurns", "options": options}
    run = {"steps": 3, "mini_batches": 2, "max_turn": 3, "lr": 1e-3, "device": "cpu"}

    def config(name):
        return small_config(
            tmp_path, env=env, train=run, log={"dir": str(tmp_path / "runs"), "name": name}
        )

    whole = train(config("whole"), sinks=[])
    stopped = train(config("stopped"), sinks=[Terminated(3)])
    assert "SIGTERM" in stopped.stopped
    assert stopped.after is None
    assert stopped.steps == 2, "not between the updates of a step"
    assert get_last_checkpoint(str(stopped.path / "checkpoints")).endswith("-4")
    assert RunReader(stopped.path).steps() == [1, 3]
    resumed = train(resume=stopped.path, sinks=[], trust=True)
    assert RunReader(resumed.path).steps() == [1, 3, 5]
    assert resumed.stopped is None
    assert resumed.after is not None
    one, other = (
        AutoModelForCausalLM.from_pretrained(result.checkpoint / "model").state_dict()
        for result in (whole, resumed)
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_run_that_learns_nothing_ends_with_advice(tmp_path):
    """A random model's replies are all illegal, so all rewards are equal."""
    config = small_config(
        tmp_path,
        train={"steps": 9, "mini_batches": 2, "max_idle_steps": 2, "device": "cpu"},
        eval={"episodes": 4, "before": False},
    )
    with pytest.raises(TrainingError, match=r"step 2: in no group .*2 of 2 such steps"):
        train(config, sinks=[])
    run = RunReader(tmp_path / "runs" / "a")
    assert run.steps() == [1, 3]
    assert run.curve("eval/reward")[0] == [4], "where the policy stands is said in any case"
    assert get_last_checkpoint(str(tmp_path / "runs" / "a" / "checkpoints")).endswith("-4")


def test_evaluations_between_and_what_is_stored_are_counted_in_steps(tmp_path):
    options = {"rows": 16, "val_fraction": 0.25}
    env = {"name": f"{Path(__file__).parent}/trl_parts.py:ThreeTurns", "options": options}
    run = {"steps": 4, "mini_batches": 2, "max_turn": 3, "lr": 1e-3, "device": "cpu"}
    found = {}
    for name, every, log in (("a", 0, {}), ("b", 2, {"episodes_every": 2, "credit": False})):
        config = small_config(
            tmp_path,
            env=env,
            train=run,
            eval={"episodes": 4, "before": False, "every": every},
            log={"dir": str(tmp_path / "runs"), "name": name, **log},
        )
        found[name] = train(config, sinks=[])
    whole, other = (RunReader(found[name].path) for name in "ab")
    assert whole.curve("eval/reward")[0] == [8], "the last one is after training"
    assert other.curve("eval/reward")[0] == [4, 8]
    assert whole.steps() == [1, 3, 5, 7]
    assert other.steps() == [1, 5], "the first and third rollout"
    assert whole.credit(1)
    assert not list(other.credit(1))
    one, two = (
        AutoModelForCausalLM.from_pretrained(result.checkpoint / "model").state_dict()
        for result in found.values()
    )
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_micro_batches_hold_so_many_tokens_and_change_no_result(tmp_path):
    """1 024 tokens are the longest row, so 2 048 hold two of the four rows of an update."""
    found = {}
    for tokens, rows in ((2048, 2), (4096, 4), (700, 1)):
        config = small_config(
            tmp_path,
            train={
                **{"steps": 1, "mini_batches": 2, "max_turn": 3, "lr": 1e-3, "device": "cpu"},
                **{"micro_batch_tokens": tokens, "warmup_steps": 3},
            },
            eval={"before": False, "after": False},
            env={"name": f"{Path(__file__).parent}/trl_parts.py:ThreeTurns"},
            log={"dir": str(tmp_path / "runs"), "name": str(tokens)},
        )
        arguments = trl_arguments(config, refuse(config))
        assert arguments["per_device_train_batch_size"] == rows
        assert arguments["gradient_accumulation_steps"] == 4 // rows
        assert arguments["warmup_steps"] == 6  # updates, two to a step
        result = train(config, sinks=[])
        assert RunReader(result.path).steps() == [1]
        model = AutoModelForCausalLM.from_pretrained(result.checkpoint / "model")
        found[rows] = dict(model.named_parameters())
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    moved = max((found[4][name] - p).abs().max() for name, p in start.named_parameters())
    assert moved > 1e-4
    for rows in (1, 2):
        for name, parameter in found[rows].items():
            torch.testing.assert_close(parameter, found[4][name], atol=1e-6, rtol=1e-3)


def test_gradient_checkpointing_is_decided_by_memory(tmp_path, monkeypatch):
    """By the share of the device that vLLM leaves."""
    asked = {}

    def answer(config, algorithm, **words):
        asked.update(words)
        return recomputes(config, algorithm, **{**words, "device": "cuda", "budget": 1 << 30})

    monkeypatch.setattr(mapping, "recomputes", answer)
    config = small_config(tmp_path, trl={"use_vllm": True})
    small = trl_arguments(config, refuse(config))
    assert (small["gradient_checkpointing"], asked["taken"]) == (False, 0.3)
    assert asked["tokens"] == 8 * 1024
    large = small_config(tmp_path, train={"micro_batch_tokens": 1 << 20, "device": "cpu"})
    groups = large.rollout.model_copy(update={"train": GroupsConfig(env_groups=64, group_size=8)})
    large = large.model_copy(update={"rollout": groups})
    assert trl_arguments(large, refuse(large))["gradient_checkpointing"] is True
    assert asked["taken"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo": {"name": "bi_level_gae"}}, "'bi_level_gae' needs a critic"),
        ({"algo": {"name": "ppo"}}, "'ppo' needs a critic"),
        ({"algo": {"name": "dapo"}}, "dynamic sampling"),
        ({"algo": {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward"}}, "algo.kl_in"),
        ({"algo": {"name": "grpo", "kl_coef": 0.1, "kl_form": "k1"}}, "algo.kl_form"),
        ({"algo": {"name": "grpo", "kl_coef": 0.1, "kl_target": 0.1}}, "algo.kl_target"),
        ({"algo": {"name": "cispo", "reduction": "episode_mean"}}, "cispo is token_mean"),
        (
            {"rollout": {"window": "last_k"}, "algo": {"name": "grpo", "kl_coef": 0.1}},
            "rollout.window",
        ),
        ({"eval": {"baselines": True}, "algo": {"name": "grpo"}}, "eval.baselines"),
        ({"rollout": {"on_failure": "drop_group"}, "algo": {"name": "grpo"}}, "on_failure"),
        ({"rollout": {"min_group_size": 4}, "algo": {"name": "grpo"}}, "min_group_size"),
        ({"train": {"packing": True}, "algo": {"name": "grpo"}}, "train.packing"),
        ({"train": {"max_gap": 0.5}, "algo": {"name": "grpo"}}, "train.max_gap"),
        ({"trl": {"learning_rat": 1.0}, "algo": {"name": "grpo"}}, "learning_rat"),
    ],
)
def test_what_trl_cannot_honour_is_refused_by_name(changes, message):
    config = Config.model_validate({"backend": "trl", **changes})
    with pytest.raises(ValueError, match=message):
        trl_arguments(config, refuse(config))
