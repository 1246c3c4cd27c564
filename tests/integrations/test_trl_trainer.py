"""VerifiersGRPOTrainer: what TRL trains on is what was sampled, whatever the run's shape."""

import re

import pytest
import torch
from trl import GRPOTrainer
from trl_parts import ThreeTurns, curve, make_args, make_trainer

from turnwise.envs.base import EnvError
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.integrations.trl import VerifiersGRPOTrainer
from turnwise.integrations.trl.credit import earlier_rows, sampled_ids, train_row
from turnwise.integrations.trl.player import BatchPlayer, Rows
from turnwise.integrations.trl.setup import episodes_config
from turnwise.integrations.trl.sources import make_source
from turnwise.log.store import RunReader
from turnwise.rollout.proxy import RolloutError
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(240)


class Recording(VerifiersGRPOTrainer):
    """Keeps what TRL is about to train on, and how old the policy was."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        kept = self.__dict__.setdefault("batches", [])
        kept.append((inputs, output, list(self._rows), self.state.global_step))
        return output


def reward_of_row(prompts, completions, answer, info, **kwargs):
    """The row's own number: shows whether rows, rewards and columns stay together."""
    assert [entry["n"] for entry in info] == answer
    assert all(
        [m["role"] for m in c] == ["assistant", "user", "assistant", "user", "assistant"]
        for c in completions
    )
    assert all(m[0]["content"] == str(n) for m, n in zip(prompts, answer, strict=True))
    return [float(n) for n in answer]


def trained_mask(output):
    return (output["completion_mask"] * output["tool_mask"]).bool()  # TRL pads tool_mask with ones


def check_rows(trainer):
    for inputs, output, rows, _ in trainer.batches:
        for index, row in enumerate(rows):
            sampled = [token for turn in row.episode.turns for token in turn.completion.ids]
            size = len(row.completion_ids)
            mask = trained_mask(output)[index]
            assert output["completion_ids"][index][mask].tolist() == sampled
            assert not output["completion_mask"][index, size:].any()
            assert row.mask[0] == row.mask[-1] == 1
            assert row.episode.task.payload["answer"] == inputs[index]["turnwise_row"]


SHAPES = [
    {},
    {"gradient_accumulation_steps": 2},
    {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 5,
    },
]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_stay_together_in_every_shape(tmp_path, shape, ahead):
    changes = {
        "max_steps": 4,
        **shape,
        "enable_async_generation": ahead > 0,
        "num_batches_ahead": max(ahead, 1),
    }
    trainer = make_trainer(
        tmp_path, cls=Recording, trainer={"reward_funcs": reward_of_row}, **changes
    )
    trainer.train()
    check_rows(trainer)
    staleness = curve(trainer, "rollout/staleness_max")
    assert (max(staleness) > 0) is (ahead > 0)
    trainer.close()


def test_logprobs_are_the_trainers_own(tmp_path):
    trainer = make_trainer(tmp_path, cls=Recording, max_steps=1, learning_rate=0.0, temperature=0.7)
    trainer.train()
    _, output, _, _ = trainer.batches[0]
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    found = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, attention, output["completion_ids"].shape[1]
    )[0]
    mask = trained_mask(output)
    assert torch.allclose(found[mask], output["sampling_per_token_logps"][mask], atol=1e-4)
    assert "old_per_token_logps" not in output  # on policy, TRL's own path


def test_stale_batches_are_corrected(tmp_path):
    changes = {"enable_async_generation": True, "max_steps": 3, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, cls=Recording, **changes)
    trainer.train()
    trainer.close()
    stale = [output for _, output, rows, step in trainer.batches if step > _version(rows)]
    assert stale
    for output in stale:
        assert output["old_per_token_logps"] is output["sampling_per_token_logps"]


def _version(rows):
    return min(turn.completion.policy_version for row in rows for turn in row.episode.turns)


def test_async_resumes_as_async(tmp_path):
    changes = {"enable_async_generation": True, "save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, max_steps=3, **changes).train()
    trainer = make_trainer(tmp_path, cls=Recording, max_steps=6, **changes)
    trainer.train(resume_from_checkpoint=True)
    check_rows(trainer)
    assert [step for *_, step in trainer.batches] == [3, 4, 5]
    assert max(curve(trainer, "rollout/staleness_max")[-2:]) > 0
    run = RunReader(tmp_path / "run")
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert any(event["kind"] == "resumed" for event in run.events())


def test_the_run_directory(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    run = RunReader(tmp_path / "run")
    assert [row["step"] for row in run.metrics() if row["step"] > 0] == [1, 2]
    assert run.curve("rollout/reward")[1] == pytest.approx(curve(trainer))
    episodes = run.episodes(2)
    assert len(episodes) == 8
    assert {episode.group_id for episode in episodes} == {0, 1}
    entry = run.ledger()[1]
    assert entry.broken == 0
    assert entry.sampled == sum(len(t.completion.ids) for e in episodes for t in e.turns)
    credit = run.credit(2)
    assert len(credit) == 8
    assert len(credit[0].advantages) == sum(len(turn.completion.ids) for turn in episodes[0].turns)


def test_evaluation(tmp_path):
    env = ThreeTurns(eval_dataset=[{"prompt": "99", "answer": 99, "info": {"n": 99}}])
    trainer = make_trainer(
        tmp_path,
        env,
        cls=Recording,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert len(curve(trainer, "eval_reward")) == 2
    splits = {
        rows[0].episode.task.split: rows[0].episode.task.payload["answer"]
        for _, _, rows, _ in trainer.batches
    }
    assert splits["val"] == 99


def test_one_broken_row_is_left_out_of_the_baseline(tmp_path):
    class Sometimes(ThreeTurns):
        def setup_state(self, state):
            if state["noise_seed"] in broken:
                raise RuntimeError("this one is broken")
            return state

    env = Sometimes(rows=2)
    trainer = make_trainer(
        tmp_path, env, cls=Recording, max_steps=1, trainer={"reward_funcs": constant}
    )
    broken = _noise_seeds(trainer, places=(1,))
    trainer.train()
    _, output, rows, _ = trainer.batches[0]
    assert [row.failed for row in rows] == [False, True, *[False] * 6]
    assert output["advantages"][1] == 0.0
    assert not trained_mask(output)[1].any()
    rewards = torch.tensor([rows[index].episode.reward for index in (0, 2, 3)])
    if rewards.std() > 0:
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        assert torch.allclose(output["advantages"][[0, 2, 3]], wanted, atol=1e-4)
    assert rows[1].episode.attempts == 2
    assert curve(trainer, "rollout/failures") == [1.0]


def constant(completions, **kwargs):
    return [5.0] * len(completions)


def _noise_seeds(trainer, places):
    from turnwise.seeding import derive_seed

    return {derive_seed(trainer.args.seed, "noise/train", 0, 0, place) for place in places}


def test_all_failing_stops_with_the_first_error(tmp_path):
    env = ThreeTurns()
    env.fail_rows = tuple(range(8))
    with pytest.raises(RolloutError, match=r"none of the 8 episodes.*row \d is broken"):
        make_trainer(tmp_path, env).train()


def test_a_hanging_environment_costs_its_own_rows(tmp_path):
    env = ThreeTurns(rows=2)
    env.hang_rows = (0,)
    trainer = make_trainer(
        tmp_path,
        env,
        cls=Recording,
        max_steps=1,
        env_timeout=0.5,
        async_timeout=20,
        episode_retries=0,
    )
    trainer.train()
    rows = trainer.batches[0][2]
    assert {row.episode.status.value for row in rows if row.failed} == {"env_timeout"}
    assert sum(row.failed for row in rows) == 4


def test_the_batch_timeout_cuts_slow_episodes(tmp_path):
    env = ThreeTurns(rows=2)
    env.hang_rows = (1,)
    trainer = make_trainer(
        tmp_path, env, cls=Recording, max_steps=1, async_timeout=3.0, env_timeout=2.9
    )
    trainer.train()
    rows = trainer.batches[0][2]
    assert sum(row.failed for row in rows) == 4


@pytest.mark.parametrize("budget", [1, 5, 23])
def test_budgets(tmp_path, budget):
    trainer = make_trainer(tmp_path, cls=Recording, max_completion_length=budget, max_steps=1)
    trainer.train()
    for row in trainer.batches[0][2]:
        assert 1 <= len(row.completion_ids) <= budget
        assert row.episode.status.truncated
    assert trainer.batches[0][1]["completion_ids"].shape[1] <= budget


def test_truncated_completions_are_masked_where_asked(tmp_path):
    trainer = make_trainer(tmp_path, cls=Recording, mask_truncated_completions=True, max_steps=1)
    trainer.train()
    # Replies of two tokens, none of which ends.
    assert trainer.batches[0][1]["completion_mask"].sum() == 0


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"loss_type": name}
            for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
        ),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"beta": 0.05},
    ],
    ids=str,
)
def test_every_loss_of_trl_trains(tmp_path, changes):
    tiny_model().save_pretrained(tmp_path / "model")  # TRL loads the reference model by its path
    trainer = make_trainer(
        tmp_path,
        model=str(tmp_path / "model"),
        enable_async_generation=True,
        credit="turn_level",
        **changes,
    )
    trainer.train()
    trainer.close()
    assert all(torch.isfinite(torch.tensor(curve(trainer, "loss"))))


@pytest.mark.parametrize(
    "credit", ["turn_level", "gigpo", "hgpo", "grpo", "dr_grpo", "rloo", "reinforce_pp"]
)
def test_credit_per_token(tmp_path, credit):
    trainer = make_trainer(
        tmp_path, cls=Recording, credit=credit, max_steps=1, per_device_train_batch_size=16
    )
    trainer.train()
    _, output, rows, _ = trainer.batches[0]
    advantages = output["advantages"]
    assert advantages.shape == output["completion_ids"].shape
    mask = trained_mask(output)
    assert not advantages[~mask].any()
    spread = [advantages[index][mask[index]].unique().numel() for index in range(len(rows))]
    assert (max(spread) > 1) is (credit in ("turn_level", "gigpo", "hgpo", "reinforce_pp"))


def test_extra_rewards_count_for_the_last_turn(tmp_path):
    def last_digit(completions, answer, **kwargs):
        return [float(index) for index in range(len(completions))]

    args = {
        "credit": "turn_level",
        "reward_weights": [0.0, 1.0],
        "scale_rewards": "none",
        "max_steps": 1,
    }
    trainer = make_trainer(tmp_path, cls=Recording, trainer={"reward_funcs": last_digit}, **args)
    trainer.train()
    _, output, rows, _ = trainer.batches[0]
    for index, row in enumerate(rows):
        wanted = index - (1.5 if index < 4 else 5.5)
        tokens = output["advantages"][index][trained_mask(output)[index]]
        assert torch.allclose(tokens, torch.full_like(tokens, wanted)), row.episode.id


def test_a_reply_without_a_limit_leaves_room_for_the_next(tmp_path):
    trainer = make_trainer(
        tmp_path,
        cls=Recording,
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_tokens_per_turn=None,
        max_completion_length=120,
    )
    trainer.train()
    episodes = [row.episode for row in trainer.batches[0][2]]
    assert all(len(episode.turns) > 1 for episode in episodes)
    assert max(len(turn.completion.ids) for one in episodes for turn in one.turns) <= 60


def test_a_rewriting_template_opens_contexts(tmp_path):
    tokenizer = tiny_tokenizer("rewriting")

    trainer = make_trainer(
        tmp_path, cls=Recording, max_steps=1, trainer={"processing_class": tokenizer}
    )
    trainer.train()  # without thinking nothing is rewritten
    assert all(row.left_out == 0 for row in trainer.batches[0][2])
    source = make_source(ThreeTurns())
    config = episodes_config(source, make_args(tmp_path, max_tokens_per_turn=64), None)
    player = BatchPlayer(
        config=config,
        source=source,
        make_generator=lambda: ScriptedGenerator(
            lambda session, ids, call: "<think>x</think>y",
            tokenizer=tokenizer,
            end_id=tokenizer.eos_token_id,
        ),
        tokenizer=tokenizer,
        timeout=20,
        ahead=False,
    )
    rows = Rows(numbers=(0,), split="train", first=0, group_size=1, moment=(0, 0))
    (episode,) = player.play(rows).result()
    row = train_row(episode, eos_id=2)
    assert sum(turn.restart for turn in episode.turns) == 3
    assert row.left_out == 2 * len(episode.turns[0].completion.ids)
    assert row.completion_ids == list(episode.turns[-1].completion.ids)
    assert [sampled_ids(one) for one in (*earlier_rows(episode), row)] == [
        list(turn.completion.ids) for turn in episode.turns
    ]
    trainer._rows = [row]
    with pytest.warns(UserWarning, match="template rewrote"):
        trainer._warn_left_out()


@pytest.mark.parametrize(
    "changes",
    [{}, {"credit": "turn_level"}, {"loss_type": "dapo", "steps_per_generation": 2}],
    ids=str,
)
def test_every_context_of_a_window_is_trained_on(tmp_path, changes):
    source = make_source(ThreeTurns())
    given = episodes_config(source, make_args(tmp_path), None)
    config = given.model_copy(
        update={"rollout": given.rollout.model_copy(update={"window": "single_turn"})}
    )
    trainer = make_trainer(tmp_path, cls=Recording, trainer={"config": config}, **changes)
    trainer.train()
    for _, output, rows, _ in trainer.batches:
        sampled = sum(len(turn.completion.ids) for row in rows for turn in row.episode.turns)
        assert int(trained_mask(output).sum()) == sampled
        assert output["completion_ids"].shape[0] == 3 * len(rows)
    assert set(curve(trainer, "rollout/untrained_tokens")) == {0.0}


class Unbounded(VerifiersGRPOTrainer):
    """Scores a batch in one pass, however many rows it has."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return GRPOTrainer.compute_loss(self, model, inputs, *args, **kwargs)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 2},
    ],
    ids=str,
)
def test_the_batch_size_bounds_every_pass(tmp_path, changes):
    """Contexts add rows; they are scored in more passes, with the same gradient."""
    source = make_source(ThreeTurns())
    given = episodes_config(source, make_args(tmp_path), None)
    config = given.model_copy(
        update={"rollout": given.rollout.model_copy(update={"window": "single_turn"})}
    )

    def run(cls, folder):
        sizes = []
        trainer = make_trainer(folder, cls=cls, trainer={"config": config}, max_steps=1, **changes)
        trainer.model.register_forward_pre_hook(
            lambda model, args, kwargs: (
                sizes.append(len(kwargs["input_ids"])) if torch.is_grad_enabled() else None
            ),
            with_kwargs=True,
        )
        trainer.train()
        weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
        return sizes, weights, curve(trainer, "grad_norm"), curve(trainer, "loss")

    sizes, weights, norm, loss = run(VerifiersGRPOTrainer, tmp_path / "bounded")
    whole = run(Unbounded, tmp_path / "whole")
    assert max(sizes) == 8
    assert max(whole[0]) == 24
    assert norm == pytest.approx(whole[2], rel=1e-4)
    assert loss == pytest.approx(whole[3], abs=1e-4)
    # AdamW's first step is the sign of the gradient: below rounding error it may differ.
    assert ((weights - whole[1]).abs() > 1e-5).float().mean() < 0.01


def test_unknown_template_without_generation_marks_works(tmp_path):
    odd = (
        "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant> {% endif %}"
    )
    trainer = make_trainer(
        tmp_path, cls=Recording, trainer={"processing_class": tiny_tokenizer(odd)}
    )
    trainer.train()
    check_rows(trainer)


def test_no_template_is_said_plainly(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        make_trainer(tmp_path, trainer={"processing_class": tiny_tokenizer("none")}).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9, "enable_async_generation": True}, "top_p = 0.9.*async generation"),
        ({"top_k": 5}, "top_k = 5"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"credit": "bi_level_gae"}, "'bi_level_gae' needs a critic, and TRL has none"),
        ({"credit": "turn_gae"}, "'turn_gae' needs a critic"),
        ({"credit": "magic"}, "credit is one of"),
        (
            {"credit": "turn_level", "scale_rewards": "batch"},
            "scale_rewards = 'batch' cannot be honoured",
        ),
        ({"credit": "gigpo", "scale_rewards": "none"}, "scale_rewards = 'none'.*'gigpo'"),
        (
            {"credit": "turn_level", "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation",
        ),
        ({"credit": "turn_level", "use_liger_kernel": True}, "one advantage per episode"),
        ({"num_batches_ahead": -1}, "num_batches_ahead"),
        ({"async_timeout": 0}, "async_timeout"),
        ({"engine": "warp"}, "engine is auto"),
    ],
)
def test_refused_settings(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **changes)


@pytest.mark.parametrize("name", ["tools", "environment_factory", "rollout_func"])
def test_two_ways_to_play_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} and env"):
        make_trainer(tmp_path, trainer={name: [print]})


def test_something_that_is_no_environment(tmp_path):
    with pytest.raises(EnvError, match="is not an environment"):
        make_trainer(tmp_path, object())


def test_config_spellings(tmp_path):
    from turnwise.trainers import VerifiersGRPOConfig

    config = VerifiersGRPOConfig(
        "run-name",
        num_batches_ahead=1,
        enable_async_generation=True,
        async_timeout=300,
        use_cpu=True,
        bf16=False,
    )
    assert (config.output_dir, config.async_timeout) == ("run-name", 300)
    old = VerifiersGRPOConfig("run-name", async_generation_timeout=7, use_cpu=True, bf16=False)
    assert old.async_timeout == 7


def test_a_missing_extra_is_named(monkeypatch):
    import turnwise.integrations.trl as package

    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("pip install 'turnwise[trl]'")):
        _ = package.VerifiersGRPOTrainer
