"""Whole runs, small ones: reproducible to the bit, resumable, and clear about what cannot be."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "learning"))

from small_runs import small_config

from turnwise.algos.credit import compute_advantages
from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.data.batch import collate
from turnwise.data.samples import episode_to_samples
from turnwise.log.doctor import diagnose, read_chart
from turnwise.log.events import Event, Notice
from turnwise.log.store import RunDirectory, RunDirectoryError, RunReader
from turnwise.train.checkpoint import list_checkpoints, read_checkpoint
from turnwise.train.run import estimate, train
from turnwise.train.step import check_ledger, training_step
from turnwise.train.trainer import PPOTrainer
from turnwise.train.update import TrainingError

LAKE: dict[str, Any] = {
    "name": "frozen_lake",
    "options": {"size": 3},
    "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
    "system_prompt": "Walk.",
}


KNOWS_THE_FORMAT = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "warmstart_episodes": 256,
    "warmstart_lr": 0.02,
}


def quick(folder: Path, **changes: object) -> Config:
    """Three steps of FrozenLake over two turns, a checkpoint after each."""
    settings = {
        "env": LAKE,
        "train": {"steps": 3, "max_turn": 2, "lr": 0.01, "critic_lr": 0.01, "mini_batches": 2},
        "eval": {"episodes": 4, "before": True, "after": True},
        "checkpoint": {"every": 1, "keep": 10},
        "model": {
            "embedded": {
                "hidden_size": 16,
                "num_layers": 1,
                "num_heads": 2,
                "warmstart_episodes": 32,
            }
        },
        "rollout": {
            "train": {"env_groups": 2, "group_size": 4},
            "max_response_tokens": 4,
            "max_context": 128,
            "slots": 8,
            "isolation": "inline",
        },
    }
    return small_config(folder, **{**settings, **changes})


def contents(run: Path) -> dict[str, bytes]:
    """Everything that two equal runs must have equal, to the byte."""
    names = ["metrics.jsonl", "ledger.jsonl"]
    files = (
        [run / name for name in names]
        + sorted(run.glob("episodes/*"))
        + sorted(run.glob("credit/*"))
    )
    last = list_checkpoints(run / "checkpoints")[-1]
    files += [last / "model" / "model.safetensors", last / "trainer.safetensors"]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    return train(quick(tmp_path_factory.mktemp("runs")), sinks=()).path


def test_a_run_is_reproducible_to_the_bit(finished: Path, tmp_path: Path) -> None:
    again = train(quick(tmp_path), sinks=()).path
    assert contents(again) == contents(finished)


def test_another_seed_is_another_run(finished: Path, tmp_path: Path) -> None:
    other = train(quick(tmp_path).model_copy(update={"seed": 1}), sinks=()).path
    assert contents(other)["metrics.jsonl"] != contents(finished)["metrics.jsonl"]


def test_running_reward_statistics_survive_a_resume(tmp_path: Path) -> None:
    lake = {**LAKE, "shaping": {"normalize": "running", "turn_cost": -0.1}}
    whole = train(quick(tmp_path / "a", env=lake), sinks=())
    torn = train(quick(tmp_path / "b", env=lake), sinks=())
    for path in list_checkpoints(torn.path / "checkpoints")[-2:]:
        (path / "manifest.json").unlink()
    train(resume=torn.path, sinks=())
    assert contents(torn.path) == contents(whole.path)
    state = json.loads(
        (list_checkpoints(torn.path / "checkpoints")[-1] / "state.json").read_text()
    )["state"]
    assert state["reward_statistics"]["frozen_lake"]["count"] == 3 * 8


def test_a_knob_that_turns_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.compile"):
        PPOTrainer(quick(tmp_path, train={"compile": True}))


@pytest.mark.parametrize("back", [1, 3])
def test_a_resumed_run_ends_like_one_never_stopped(
    finished: Path, tmp_path: Path, back: int
) -> None:
    copy = tmp_path / "copy"
    _copy(finished, copy)
    for path in list_checkpoints(copy / "checkpoints")[-back:]:
        (path / "state.json").unlink()  # torn, as if the disk had lost it
    result = train(resume=copy, sinks=())
    assert result.steps == 3
    assert contents(copy) == contents(finished)
    kinds = [event["kind"] for event in RunReader(copy).events()]
    assert kinds.count("checkpoint_refused") == back
    assert "resumed" in kinds


def test_a_checkpoint_loads_with_from_pretrained(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = list_checkpoints(finished / "checkpoints")[-1] / "model"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "P _ G"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    assert ids.shape[1] == 6  # user, P, _, G, end, assistant
    assert model(ids).logits.isfinite().all()


def test_the_ratio_is_one_before_the_first_update(tmp_path: Path) -> None:
    trainer = PPOTrainer(quick(tmp_path))
    rollout = trainer.proxy.play(0)
    rows = collate(
        [sample for episode in rollout.episodes for sample in episode_to_samples(episode)]
    )
    scored = trainer.learner.score(rows, old_logprobs=True)
    ratio = (scored.old_logprobs - scored.logprobs)[scored.loss_mask].exp()
    assert (ratio - 1.0).abs().max() < 1e-5
    metrics = trainer.learner.gradients(compute_advantages(scored, trainer.algorithm)[0])
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    trainer.proxy.close()
    trainer.run.close()


def test_entropies_are_stored_where_the_step_scores_its_tokens(
    finished: Path, tmp_path: Path
) -> None:
    trainer = PPOTrainer(quick(tmp_path))
    result = training_step(
        0,
        proxy=trainer.proxy,
        learner=trainer.learner,
        normalizer=trainer.normalizer,
        pad_id=trainer.policy.tokenizer.pad_token_id,
        exact=False,
    )
    trainer.run.write_credit(1, result.credit)
    rows = trainer.run.credit(1)
    most = math.log(trainer.policy.model.config.vocab_size)
    assert rows
    for row in rows:
        assert len(row.entropies) == len(row.turn_ids) == len(row.gaps)
        assert all(0.0 <= value <= most + 1e-4 for value in row.entropies)
    assert len({value for row in rows for value in row.entropies}) > 1
    trainer.proxy.close()
    trainer.run.close()
    # The sampler's log-probs are exact on the CPU: nothing is scored before the update.
    assert not any(row.entropies or row.gaps for row in RunReader(finished).credit(1))


def test_a_changed_token_stops_training(tmp_path: Path) -> None:
    trainer = PPOTrainer(quick(tmp_path))
    rollout = trainer.proxy.play(0)
    rows = collate(
        [sample for episode in rollout.episodes for sample in episode_to_samples(episode)]
    )
    assert check_ledger(0, rollout.episodes, rows).broken == 0
    where = rows.response_mask.nonzero()[0]
    rows.input_ids[where[0], where[1]] += 1
    with pytest.raises(TrainingError, match="token fidelity is broken in 1 of 8 rows"):
        check_ledger(0, rollout.episodes, rows)
    trainer.proxy.close()
    trainer.run.close()


def test_a_run_directory_in_use_is_refused(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    _copy(finished, copy)
    with RunDirectory.open(copy), pytest.raises(RunDirectoryError, match="in use by process"):
        train(resume=copy, sinks=())


def test_another_model_on_resume_is_refused(finished: Path) -> None:
    config = RunReader(finished).config
    embedded = config.model.embedded.model_copy(update={"hidden_size": 32})
    other = config.model_copy(
        update={"model": config.model.model_copy(update={"embedded": embedded})}
    )
    before = contents(finished)
    with pytest.raises(ValueError, match="a run goes on with the model that it began with"):
        train(other, resume=finished, sinks=())
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algo.name=grpo"], "algo.name = 'bi_level_gae', and the config now says 'grpo'"),
        (["env.name=bandit"], "env.name = 'frozen_lake', and the config now says 'bandit'"),
        (["seed=3"], "seed = 0, and the config now says 3"),
        (["model.path=elsewhere"], "model.path = None, and the config now says 'elsewhere'"),
    ],
)
def test_another_run_on_resume_is_refused_by_name(
    finished: Path, words: list[str], said: str
) -> None:
    stored = (finished / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match=said) as refused:
        train(load_config(finished / "config.yaml", words), resume=finished, sinks=())
    remedy = f"start a new run instead, from its weights with model.path={finished}/checkpoints/"
    assert remedy in str(refused.value)
    assert (finished / "config.yaml").read_bytes() == stored


def test_settings_that_cannot_be_are_not_stored(finished: Path) -> None:
    """The run can go on with its own settings afterwards."""
    stored = (finished / "config.yaml").read_bytes()
    words = ["rollout.generator=nowhere:it", "train.steps=4"]
    with pytest.raises(ValueError, match="no module 'nowhere'"):
        train(load_config(finished / "config.yaml", words), resume=finished, sinks=())
    assert (finished / "config.yaml").read_bytes() == stored


def test_a_resume_says_that_code_and_settings_changed(tmp_path: Path) -> None:
    file = tmp_path / "coin.py"
    file.write_text(
        "from turnwise import BaseEnv\n\n\nclass Coin(BaseEnv):\n"
        "    actions = ('heads', 'tails')\n    pay = 1.0\n\n"
        "    def reset(self, seed=None, **kwargs):\n        return 'Call.'\n\n"
        "    def step(self, action):\n        won = action == 'heads'\n"
        "        return 'Over.', self.pay * won, True, {}\n"
    )
    env = {**LAKE, "name": f"{file}:Coin", "options": {}}
    done = train(quick(tmp_path, env=env, train={"steps": 1, "max_turn": 1}), sinks=())
    words = ["train.steps=2", "env.system_prompt=Choose."]
    told: list[Event] = []

    class Told:
        def handle(self, event: Event) -> None:
            told.append(event)

        def close(self) -> None:
            pass

    file.write_text(file.read_text().replace("1.0", "2.0"))
    train(load_config(done.path / "config.yaml", words), resume=done.path, sinks=[Told()])
    said = {event.kind: event.message for event in told if isinstance(event, Notice)}
    assert f"{file} changed since step 1" in said["code_changed"]
    assert "env.system_prompt 'Walk.' -> 'Choose.'" in said["config_changed"]
    assert "train.steps 1 -> 2" in said["config_changed"]
    assert "earlier evaluations were played with the old" in said["config_changed"]


def without_variance(folder: Path, *, env: str, steps: int = 9) -> Config:
    """Every legal reply pays the same; the warm start knows the format, so replies are legal."""
    return quick(
        folder,
        env={
            **LAKE,
            "name": env,
            "options": {},
            "format": {**LAKE["format"], "format_penalty": 0.0},
        },
        algo={"name": "grpo"},
        train={"steps": steps, "max_idle_steps": 2, "max_collapsed_steps": 0},
        model={"embedded": KNOWS_THE_FORMAT},
    )


def test_groups_without_variance_are_said_and_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Stopped: no episode succeeds"):
        train(without_variance(tmp_path, env="learn_envs:Hopeless"), sinks=())
    run = next(iter(tmp_path.iterdir()))
    assert [event["kind"] for event in RunReader(run).events()].count("idle_step") >= 2
    state = read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).state
    assert [event["label"] for event in state["evaluations"]] == ["before", "after"]


def test_a_solved_run_ends_before_its_last_step(tmp_path: Path) -> None:
    result = train(without_variance(tmp_path, env="learn_envs:Constant"), sinks=())
    assert result.steps < 9
    kinds = [event["kind"] for event in RunReader(result.path).events()]
    assert kinds.count("solved") == 1
    assert result.before is not None
    assert result.after is not None


def test_a_last_step_without_variance_ends_a_run_like_any_other(tmp_path: Path) -> None:
    result = train(without_variance(tmp_path, env="learn_envs:Hopeless", steps=2), sinks=())
    assert result.steps == 2


@pytest.mark.parametrize("env", ["Hopeless", "Silent"])
def test_a_run_that_says_one_thing_without_success_stops_with_advice(
    tmp_path: Path, env: str
) -> None:
    config = quick(
        tmp_path,
        env={**LAKE, "name": f"learn_envs:{env}", "options": {}},
        train={"steps": 9, "max_turn": 1, "lr": 1e-5, "max_collapsed_steps": 3},
        model={"embedded": KNOWS_THE_FORMAT},
        rollout={
            "train": {"env_groups": 2, "group_size": 4},
            "max_response_tokens": 4,
            "temperature": 0.05,
            "isolation": "inline",
        },
    )
    with pytest.raises(TrainingError, match="every reply is the same and nothing succeeds"):
        train(config, sinks=())
    run = next(iter(tmp_path.iterdir()))
    assert [event["kind"] for event in RunReader(run).events()].count("collapse_stop") == 1
    checkpoint = read_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    assert checkpoint.step == 3
    assert [event["label"] for event in checkpoint.state["evaluations"]] == ["before", "after"]
    assert "collapsed" in [one.name for one in diagnose(read_chart(RunReader(run)))]
    off = config.train.model_copy(update={"max_collapsed_steps": 0, "steps": 5})
    result = train(config.model_copy(update={"train": off}), resume=run, sinks=())
    assert result.steps == 5


def _prompts(folder: Path) -> dict[str, object]:
    lines = [json.dumps({"prompt": f"Say {word}.", "answer": word}) for word in ("yes", "no")] * 10
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(
        "def score(prompt, completion, answer):\n    return len(completion) % 3\n"
    )
    return {
        "prompts": str(folder / "prompts.jsonl"),
        "reward": f"{folder / 'reward.py'}:score",
        "val_fraction": 0.3,
    }


def _with_model(folder: Path) -> dict[str, object]:
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    tiny_model(hidden_size=16, num_layers=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return {"path": str(folder / "model")}


def test_plain_prompts_train_without_an_environment(tmp_path: Path) -> None:
    config = quick(
        tmp_path / "runs",
        model=_with_model(tmp_path),
        data=_prompts(tmp_path),
        train={"steps": 1, "multi_turn": False},
        algo={"name": "grpo"},
    )
    result = train(config, sinks=())
    episodes = RunReader(result.path).episodes(1)
    assert {len(episode.turns) for episode in episodes} == {1}
    assert episodes[0].prompt[0].content.startswith("Say ")
    assert result.after is not None


def test_an_environment_that_cannot_be_loaded_falls_back_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = quick(
        tmp_path / "runs",
        env={"name": "learn_envs:Broken", "options": {}},
        model=_with_model(tmp_path),
        data=_prompts(tmp_path),
        train={"steps": 1, "multi_turn": True},
        algo={"name": "grpo"},
    )
    result = train(config, sinks=())
    events = RunReader(result.path).events()
    assert events[0]["kind"] == "single_turn_fallback"
    assert "MULTI-TURN TRAINING IS OFF" in events[0]["message"]
    assert "the data of this environment is not there" in caplog.text


def test_without_prompts_there_is_nothing_to_fall_back_to(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be loaded: OSError: the data .*learn_envs.py, line"
    ):
        PPOTrainer(quick(tmp_path, env={"name": "learn_envs:Broken", "options": {}}))
    assert not tmp_path.exists() or not any(tmp_path.iterdir()), "nothing is left behind"


def test_a_single_turn_environment_is_found_out(tmp_path: Path) -> None:
    trainer = PPOTrainer(small_config(tmp_path, train={"multi_turn": True}))
    assert trainer.config.train.multi_turn is False
    assert RunReader(trainer.run.path).events()[0]["kind"] == "single_turn"
    trainer.proxy.close()
    trainer.run.close()


@pytest.mark.parametrize(
    ("model", "algo"),
    [
        ({"lora": {"rank": 2}}, {"name": "bi_level_gae", "kl_coef": 0.1}),
        (
            {"critic": "shared"},
            {"name": "bi_level_gae", "kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.01},
        ),
        ({"gradient_checkpointing": True}, {"name": "grpo", "kl_coef": 0.1}),
    ],
)
def test_lora_shared_critics_and_checkpointing_resume_too(
    tmp_path: Path, model: dict[str, object], algo: dict[str, object]
) -> None:
    given = {**_with_model(tmp_path), **model}
    whole = train(
        quick(tmp_path / "a", model=given, algo=algo, train={"steps": 2, "max_turn": 2}), sinks=()
    )
    torn = train(
        quick(tmp_path / "b", model=given, algo=algo, train={"steps": 2, "max_turn": 2}), sinks=()
    )
    for path in list_checkpoints(torn.path / "checkpoints")[-1:]:
        (path / "manifest.json").unlink()
    train(resume=torn.path, sinks=())
    assert contents(torn.path) == contents(whole.path)


@pytest.mark.parametrize(("first", "then"), [(0.05, 0.5), (0.0, 0.5), (0.05, 0.0)])
def test_a_fixed_kl_coefficient_given_at_a_resume_counts(
    tmp_path: Path, first: float, then: float
) -> None:
    done = train(
        quick(tmp_path, algo={"name": "grpo", "kl_coef": first}, train={"steps": 1, "max_turn": 1}),
        sinks=(),
    )
    further = quick(
        tmp_path, algo={"name": "grpo", "kl_coef": then}, train={"steps": 2, "max_turn": 1}
    )
    trainer = PPOTrainer(further, resume=done.path)
    assert trainer.learner.algorithm.kl_coef == trainer.learner.kl.coef == then
    assert trainer.fit().steps == 2


def test_one_evaluated_episode_has_no_interval_and_can_be_stored(tmp_path: Path) -> None:
    eval_config = {"episodes": 1, "before": True, "after": True}
    done = train(quick(tmp_path, eval=eval_config, train={"steps": 1, "max_turn": 1}), sinks=())
    resumed = train(
        quick(tmp_path, eval=eval_config, train={"steps": 2, "max_turn": 1}),
        resume=done.path,
        sinks=(),
    )
    assert resumed.before is not None
    assert resumed.before.reward == (-float("inf"), done.before.reward[1], float("inf"))


def test_a_critic_learns_where_the_policy_cannot(tmp_path: Path) -> None:
    """Every reward is the same, so no advantage differs; the critic is wrong all the same."""
    config = quick(
        tmp_path,
        env={**LAKE, "name": "learn_envs:Constant", "options": {}},
        algo={"name": "ppo"},
        train={"steps": 2, "max_turn": 1, "critic_lr": 0.01, "critic_warmup": 2},
    )
    rows = [row for row in RunReader(train(config, sinks=()).path).metrics() if "train/idle" in row]
    assert [row["train/idle"] for row in rows] == [0.0, 0.0]
    assert rows[0]["critic/value_mean"] == 0.0
    assert rows[1]["critic/value_mean"] != 0.0


def test_a_warm_up_without_a_critic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"train\.critic_warmup=3 means nothing to algo\.name='grpo'"
    ):
        PPOTrainer(quick(tmp_path, algo={"name": "grpo"}, train={"critic_warmup": 3}))


def test_the_warm_start_ends_where_the_context_does(tmp_path: Path) -> None:
    def short(ids: int) -> Config:
        rollout = {
            "train": {"env_groups": 2, "group_size": 4},
            "max_context": ids,
            "isolation": "inline",
        }
        return quick(tmp_path, rollout=rollout, train={"steps": 1, "max_turn": 3})

    statuses = [
        episode.status.value for episode in RunReader(train(short(40), sinks=()).path).episodes(1)
    ]
    assert set(statuses) == {"truncated_length"}
    with pytest.raises(ValueError, match=r"no opening fits into rollout\.max_context=8"):
        PPOTrainer(short(8))


def test_an_evaluation_that_fails_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = PPOTrainer(
        quick(tmp_path, checkpoint={"every": 0}, train={"steps": 2, "max_turn": 1})
    )
    evaluate = trainer.evaluate

    def fails(label):
        if label == "after":
            raise RuntimeError("the server went away")
        return evaluate(label)

    monkeypatch.setattr(trainer, "evaluate", fails)
    with pytest.raises(RuntimeError, match="the server went away"):
        trainer.fit()
    assert list_checkpoints(trainer.run.path / "checkpoints")[-1].name == "step_000002"


def test_settings_given_at_a_resume_are_stored(tmp_path: Path) -> None:
    done = train(quick(tmp_path, train={"steps": 1, "max_turn": 1}), sinks=())
    train(
        quick(tmp_path, train={"steps": 2, "max_turn": 1, "lr": 0.03}), resume=done.path, sinks=()
    )
    reader = RunReader(done.path)
    assert (reader.config.train.steps, reader.config.train.lr) == (2, 0.03)
    (event,) = [event for event in reader.events() if event["kind"] == "config_changed"]
    assert event["changed"]["train.steps"] == [1, 2]
    assert set(event["changed"]) >= {"train.steps", "train.lr"}


def test_the_warm_start_passes_over_what_fails_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = quick(
        tmp_path,
        env={**LAKE, "name": "learn_envs:Moody", "options": {}},
        train={"steps": 1, "max_turn": 1},
    )
    assert train(config, sinks=()).steps == 1
    assert (
        "of the random player failed, the first: learn_envs:Moody: reset raised RuntimeError: not "
        "today" in caplog.text
    )


def test_a_model_path_that_leads_nowhere_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: /no/such/model does not exist"):
        PPOTrainer(quick(tmp_path, model={"path": "/no/such/model"}))


def test_a_device_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"train\.device is auto, cpu, cuda or cuda:N, got 'banana'"
    ):
        PPOTrainer(quick(tmp_path, train={"device": "banana"}))


def test_a_run_that_cannot_begin_leaves_its_name_free(tmp_path: Path) -> None:
    wrong = {
        "embedded": {"hidden_size": 65, "num_layers": 1, "num_heads": 2, "warmstart_episodes": 16}
    }
    log = {"dir": str(tmp_path), "name": "mine", "report": False}
    with pytest.raises(ValueError, match="65"):
        PPOTrainer(quick(tmp_path, model=wrong, log=log))
    assert (
        train(quick(tmp_path, log=log, train={"steps": 1, "max_turn": 1}), sinks=()).path.name
        == "mine"
    )


def test_prompts_need_a_model(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say 1."}\n')
    data = {"prompts": str(tmp_path / "rows.jsonl"), "reward": "builtins:len"}
    with pytest.raises(ValueError, match=r"training on data\.prompts needs model\.path"):
        PPOTrainer(quick(tmp_path / "runs", data=data, train={"multi_turn": False}))


def test_an_estimate_speaks_of_the_whole_run(tmp_path: Path) -> None:
    found = estimate(quick(tmp_path, train={"steps": 50, "max_turn": 2}))
    assert found.steps == 50
    assert found.seconds > 50 * found.step_seconds > 0
    assert found.memory_bytes > 0
    assert not tmp_path.exists() or not any(tmp_path.iterdir())


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def test_threads_are_left_as_they_were() -> None:
    assert torch.are_deterministic_algorithms_enabled() is False
