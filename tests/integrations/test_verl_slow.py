"""Longer runs on verl: two ranks and resume, other algorithms, losses of workers, the seeds'
examples, learning."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_parts import ROOT, run_python, tiny_config, train_apart, trained

from turnwise.algos.kl import KLState, update_kl
from turnwise.envs.registry import make_env
from turnwise.log.store import RunReader
from turnwise.rollout.plan import plan_rollout
from turnwise.train.optim import lr_factor

pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_ranks_and_resume(tmp_path: Path) -> None:
    # An evaluation at the checkpoint: its row must not stand before that of the step.
    words = ("checkpoint.every=2", "eval.after=true")
    config = tiny_config(tmp_path, *words)
    run, _ = trained(tmp_path, config, gpus=2)
    assert (run.path / "checkpoints" / "global_step_2").is_dir()
    longer = tiny_config(tmp_path, *words, "train.steps=3")
    outcome = train_apart(tmp_path, longer, gpus=2, resume=str(run.path))
    assert outcome.code == 0, outcome.text[-4000:]
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert row["actor/grad_norm"] > 0
        assert row["rollout/failures"] == 0
    # The third step plays the third step's tasks, with the weights of the second.
    episodes = run.episodes(2)
    plans = plan_rollout(
        config, split="train", step=2, probes={"simple_game": make_env(config.env)}
    )
    assert [episode.task for episode in episodes] == [plan.task for plan in plans]
    assert {turn.completion.policy_version for episode in episodes for turn in episode.turns} == {2}


def test_two_nodes(tmp_path: Path) -> None:
    """A running Ray cluster of two nodes with one device each, so that each takes one of the two
    ranks"""
    source = tmp_path / "given.yaml"
    source.write_text(json.dumps(tiny_config(tmp_path).model_dump(mode="json")))
    code = "import sys; from turnwise.cli.main import main; main(sys.argv[1:])"
    nodes = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "integrations" / "verl_cluster.py"), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert nodes.stdout is not None
        address = next(line for line in nodes.stdout if line.startswith("ADDRESS ")).split()[1]
        words = ["train", str(source), "--backend", "verl", "--address", address, "--gpus", "1"]
        refused = run_python(code, *words, "--nodes", "3", seconds=90)
        assert refused.code != 0
        assert "the cluster's nodes have [1, 1]" in refused.text
        outcome = run_python(code, *words, "--nodes", "2", "log.name=both")
    finally:
        os.killpg(nodes.pid, 9)
    assert outcome.code == 0, outcome.text[-4000:]
    print(f"two nodes took {outcome.seconds:.0f} s")
    rows = [
        row for row in RunReader(tmp_path / "runs" / "both").metrics() if "rollout/reward" in row
    ]
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert row["actor/grad_norm"] > 0
        assert row["rollout/failures"] == 0


def test_members_of_few_groups_are_played_by_all_workers(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "env.name=verl_envs:Signed",
        "train.steps=1",
        "verl={actor_rollout_ref.rollout.agent.num_workers: 4}",
    )
    run, _ = trained(tmp_path, config)
    episodes = run.episodes(0)
    assert len(episodes) == 4  # two groups of two
    assert len({episode.prompt[-1].content for episode in episodes}) == 4
    assert {entry.broken for entry in run.ledger()} == {0}


def test_a_step_does_not_wait_for_its_slowest_groups(tmp_path: Path) -> None:
    """Group 1 of both steps would take an hour. Its members are on all workers."""
    config = tiny_config(
        tmp_path,
        f"env.name={ROOT}/tests/integrations/verl_envs.py:Late",
        "env.format.style=raw",
        "rollout.train.env_groups=3",
        "rollout.enough_groups=2",
        "rollout.isolation=thread",
        "rollout.step_timeout=900",
        "verl={actor_rollout_ref.rollout.agent.num_workers: 4}",
    )
    probes = {config.env.name: make_env(config.env)}
    plans = [plan_rollout(config, split="train", step=step, probes=probes) for step in range(2)]
    slow = [plan.task.seed for step in plans for plan in step if plan.group_id == 1]
    env = config.env.model_copy(update={"options": {"slow": slow}})
    run, _ = trained(tmp_path, config.model_copy(update={"env": env}))
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert [row["rollout/late_episodes"] for row in rows] == [2, 2]
    assert [row["rollout/failures"] for row in rows] == [0, 0]
    assert [row["actor/grad_norm"] > 0 for row in rows] == [True, True]
    for step in range(2):
        groups = {episode.group_id for episode in run.episodes(step)}
        assert groups == {3 * step, 3 * step + 2}
    assert {entry.broken for entry in run.ledger()} == {0}


def test_our_pace(tmp_path: Path) -> None:
    """Schedule, early stop, adaptive KL and reward normalisation are a native run's; a resumed run
    takes them up"""
    options = (
        "train.schedule=linear",
        "train.warmup_steps=1",
        "train.epochs=3",
        "train.target_kl=1e-9",
        "algo.kl_coef=0.1",
        "algo.kl_target=0.02",
        "env.shaping.normalize=running",
        "checkpoint.every=2",
    )
    config = tiny_config(tmp_path, "train.steps=4", *options)
    run, _ = trained(tmp_path, config)
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert [row["train/lr"] for row in rows] == [
        config.train.lr * lr_factor(config.train, step) for step in range(4)
    ]
    # The policy moves in the first update, so the second is not made; the critic makes as many.
    assert [(row["train/updates"], row["train/kl_stop"]) for row in rows] == [(1.0, 1.0)] * 4
    assert rows[0]["train/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    kl = KLState(coef=0.1, target=0.02)
    for row in rows:
        assert row["actor/kl_coef"] == row["train/kl_coef"] == pytest.approx(kl.coef, rel=1e-12)
        kl = update_kl(kl, kl=row["train/kl_ref"], num_episodes=4)
    state = json.loads((run.path / "checkpoints" / "global_step_4" / "turnwise.json").read_text())
    assert state["kl_coef"] == pytest.approx(kl.coef, rel=1e-12)
    assert state["reward_statistics"]["simple_game"]["count"] == 16
    assert state["reward_statistics"]["simple_game"]["mean"] == pytest.approx(-0.3)


def test_rays_own_settings_reach_it() -> None:
    code = """
import ray
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.faults.cluster import ray_options, start_ray
env = {"runtime_env": {"env_vars": {"MINE": "1"}}, "num_cpus": 21}
assert start_ray(Placement(), options=ray_options({"ray_kwargs.ray_init": env}))
seen = ray.get_runtime_context().runtime_env["env_vars"]
print("CPUS", ray.cluster_resources()["CPU"], seen["MINE"], seen["VERL_PLATFORM"])
"""
    outcome = run_python(code)
    assert "CPUS 21.0 1 cpu" in outcome.text, outcome.text[-3000:]


def test_a_run_that_is_out_of_time(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "train.steps=50", "train.max_minutes=0.001", "eval.after=true")
    run, _ = trained(tmp_path, config)
    assert [row["step"] for row in run.metrics() if "rollout/reward" in row] == [0]
    summary = run.summary()
    assert (summary["steps"], summary["after"]["step"]) == (1, 1)
    assert (run.path / summary["checkpoint"] / "actor").is_dir()


@pytest.mark.parametrize("name", ["Easy", "Picky"])
def test_a_run_that_learns_nothing(tmp_path: Path, name: str) -> None:
    """It is solved, or ends with advice."""
    config = tiny_config(
        tmp_path,
        "algo.name=grpo",
        "train.steps=9",
        "train.max_idle_steps=2",
        "eval.after=true",
        f"env.name={ROOT}/tests/integrations/verl_envs.py:{name}",
        "env.format.style=raw",
    )
    if name == "Picky":
        outcome = train_apart(tmp_path, config)
        assert outcome.code != 0
        assert "step 2: in no group did episodes differ in reward" in outcome.text
        assert "Stopped: no episode succeeds. Make tasks easier" in outcome.text
        return
    run, _ = trained(tmp_path, config)
    assert [row["step"] for row in run.metrics() if "rollout/reward" in row] == [0, 1]
    summary = run.summary()
    assert (summary["steps"], summary["after"]["step"]) == (2, 2)
    assert (run.path / summary["checkpoint"] / "actor").is_dir()
    assert any(event["kind"] == "solved" for event in run.events())


def test_grpo_with_reference_filter_windows_and_failures(tmp_path: Path) -> None:
    """Groups as baselines, a KL in the loss, several rows per episode, and members that fail on the
    way"""
    config = tiny_config(
        tmp_path,
        "algo.name=grpo",
        "algo.reduction=token_mean",
        "algo.kl_coef=0.1",
        "algo.filter=dynamic",
        "rollout.window=last_k",
        "rollout.window_turns=1",
        "rollout.train.group_size=4",
        "rollout.retries=0",
        f"env.name={ROOT}/tests/integrations/verl_envs.py:Fragile",
        "env.format.style=raw",
    )
    run, _ = trained(tmp_path, config)
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/failures"] + row["rollout/episodes"] == 8
        assert row["rollout/contexts"] > 1
        assert row["actor/kl_loss"] is not None
    assert sum(row["rollout/failures"] for row in rows) > 0
    assert all(not episode.status.failed for step in (0, 1) for episode in run.episodes(step))


def test_a_program_trains_the_role_that_it_names(tmp_path: Path) -> None:
    """The judge speaks first, is paid, and is in the ledger, but nothing is learned from it"""
    config = tiny_config(
        tmp_path,
        "algo.name=dapo",
        "rollout.train.group_size=4",
        f"env.name=agent:{ROOT}/tests/integrations/team.py:team",
        "env.options.trained_roles=[player]",
        "rollout.isolation=auto",
    )
    run, _ = trained(tmp_path, config)
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert rows[0]["filter/groups"] == 4, "each role is compared with the same role"
    assert [row["rollout/turns"] for row in rows] == [2, 2]
    assert rows[0]["actor/grad_norm"] > 0
    for entry in run.ledger():
        assert (entry.broken, entry.sampled) == (0, entry.trained)
    credit = run.credit(0)
    assert not any(any(row.advantages) for row in credit if row.sample == 0)
    assert any(any(row.advantages) for row in credit if row.sample == 1)


@pytest.mark.parametrize("choice", ["drop", "train"])
def test_groups_of_penalties_alone_teach_only_if_asked(tmp_path: Path, choice: str) -> None:
    config = tiny_config(
        tmp_path,
        "algo.name=grpo",
        "algo.reduction=token_mean",
        "rollout.window=last_k",
        "rollout.window_turns=1",
        "rollout.train.group_size=4",
        f"algo.penalty_only_groups={choice}",
        f"env.name={ROOT}/tests/integrations/verl_envs.py:Picky",
        "env.format.style=raw",
    )
    run, _ = trained(tmp_path, config)
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert rows[0]["group/penalty_only"] == 2.0, "every group has odd and even replies"
    assert rows[0]["rollout/reward"] < 0, "what was paid is told"
    assert ("actor/grad_norm" in rows[0]) == (choice == "train")


def test_an_environment_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        f"env.name={ROOT}/tests/integrations/verl_envs.py:Broken",
        "env.format.style=raw",
        "rollout.retries=0",
    )
    outcome = train_apart(tmp_path, config)
    assert outcome.code != 0
    assert "RolloutError" in outcome.text
    assert "the floor is gone" in outcome.text


def test_a_step_that_stands_still_says_what_it_waits_for(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        f"env.name={ROOT}/tests/integrations/verl_envs.py:Stalls",
        "env.format.style=raw",
        "train.steps=1",
        "rollout.stall_timeout=2",
    )
    outcome = train_apart(tmp_path, config)
    assert outcome.code == 0, outcome.text[-4000:]
    assert "(rollout.stall_timeout); waiting for train-000000-g" in outcome.text
    assert "train-000000-g1-m1" in outcome.text


def test_an_error_of_a_worker_is_in_the_drivers_message(tmp_path: Path) -> None:
    """The environment is sound, and what plays it fails in the worker alone"""
    outcome = train_apart(tmp_path, tiny_config(tmp_path, "rollout.top_k=5", "train.steps=1"))
    assert outcome.code != 0
    assert "RolloutError" in outcome.text
    assert "first error: worker_error: ValueError: rollout.top_k = 5" in outcome.text


@pytest.mark.parametrize("victim", ["agent", "server", "trainer", "queue", "storage"])
def test_a_killed_worker_is_an_error_within_a_minute(tmp_path: Path, victim: str) -> None:
    code = """
import sys
from verl_killer import run
run(sys.argv[1], sys.argv[2])
"""
    path = tmp_path / "given.json"
    path.write_text(
        tiny_config(tmp_path, "train.steps=500", "log.episodes_every=0").model_dump_json()
    )
    outcome = run_python(code, str(path), victim)
    assert outcome.code == 0, outcome.text[-4000:]
    report = json.loads(outcome.text.split("KILLED ")[1].splitlines()[0])
    assert report["error"] == "WorkerDiedError", report["message"]
    assert "died in step" in report["message"]
    assert report["seconds"] < 60


def test_lockstep_generation_and_a_reward_function(tmp_path: Path) -> None:
    """The constructor with all that a user may bring: verl's config, roles, a pool, an agent,
    rewards of one's own; and SyncMultiTurnRollout as the generation step"""
    code = """
import json, sys
from pathlib import Path
import torch
from verl import DataProto
from turnwise.config.schema import Config
from turnwise.integrations.verl import AgentTrainer
from turnwise.integrations.verl.trainer.custom import _create_verl_config
from turnwise.integrations.verl.trainer.pools import _default_resource_pool, _default_role_mapping
from turnwise.rollout.agents import Agent
from turnwise.testing.tiny import tiny_tokenizer

class MyAgentClass(Agent):
    def act(self, text):
        print("ACTED", flush=True)
        return text

def reward_fn(data):
    said = data.batch["response_mask"].sum(-1)
    print("ROWS", sorted(data.batch.keys()), data.non_tensor_batch["index"].tolist(), flush=True)
    return said.float() + torch.arange(len(said))

tokenizer = tiny_tokenizer()
config = _create_verl_config(Config.model_validate(json.loads(Path(sys.argv[1]).read_text())))
trainer = AgentTrainer(
    config=config,
    tokenizer=tokenizer,
    role_worker_mapping=_default_role_mapping(config),
    resource_pool_manager=_default_resource_pool(config),
    agent_cls=MyAgentClass,
    processor=None,
    reward_fn=reward_fn,
)
assert trainer.multi_turn_rollout is None
trainer.init_workers()
assert type(trainer.multi_turn_rollout).__name__ == "SyncMultiTurnRollout"
seeds = DataProto.from_dict({"input_ids": torch.zeros(2, 3, dtype=torch.int64)})
print("SEED", len(trainer._generate_multi_turn_sequences(seeds)), sorted(seeds.meta_info))
trainer.fit()
history = [metrics for _, metrics in trainer.recorder.history]
print("STEPS", [metrics["train/episode/return_mean"] for metrics in history])
print("SHOWN", [metrics["rollout/reward"] for metrics in history])
"""
    config = tiny_config(tmp_path, "verl={turnwise.lockstep: true}")
    path = tmp_path / "given.json"
    path.write_text(config.model_dump_json())
    outcome = run_python(code, str(path))
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.text.count("ROWS") == 2
    assert "SEED 4 ['do_sample', 'eos_token_id', 'pad_token_id']" in outcome.text
    assert outcome.text.count("ACTED") == 36  # three rollouts of four episodes of three turns
    assert "STEPS [25.5, 25.5]" in outcome.text  # 24 sampled tokens each, and 0, 1, 2, 3
    assert "SHOWN [25.5, 25.5]" in outcome.text
    run = RunReader(tmp_path / "runs" / "run")
    plans = plan_rollout(
        config, split="train", step=1, probes={"simple_game": make_env(config.env)}
    )
    assert [episode.task for episode in run.episodes(1)] == [plan.task for plan in plans]
    assert [entry.broken for entry in run.ledger()] == [0, 0]
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert rows[1]["training/rollout_actor_probs_pearson_corr"] > 0.999


def test_failures_in_lockstep_are_told(tmp_path: Path) -> None:
    words = [
        "algo.name=grpo",
        "env.format.style=raw",
        "rollout.train.group_size=4",
        "verl={turnwise.lockstep: true}",
        "log.episodes_every=5",
    ]
    envs = f"{ROOT}/tests/integrations/verl_envs.py"
    run, _ = trained(tmp_path, tiny_config(tmp_path, *words, f"env.name={envs}:Fragile"))
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert rows[0]["rollout/failures"] == rows[0]["rollout/failures/env_error"] > 0
    assert (len(run.episodes(0)) > 0, run.episodes(1)) == (True, [])
    words += [f"env.name={envs}:Broken", "log.name=broken"]
    outcome = train_apart(tmp_path, tiny_config(tmp_path, *words))
    assert outcome.code != 0
    assert "step 1: no group is whole enough" in outcome.text
    assert "first error: env_error: " in outcome.text
    assert "the floor is gone" in outcome.text


@pytest.mark.parametrize("how", ["reward_fn", "multi_turn_engine"])
def test_rewards_by_the_wrapper(tmp_path: Path, how: str) -> None:
    """create_trainer with a judge of single steps, or with an engine that plays on from the model's
    one reply"""
    code = """
import json, sys
from pathlib import Path
from turnwise.config.schema import Config
from turnwise.envs.games.simple_game import SimpleGameEnvironment
from turnwise.integrations.verl import create_trainer
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message

class Engine:
    def run_episode(self, env, response):
        return sum(env.step(Message(role="assistant", content=response)).reward for _ in range(2)) + len(response)

given = {"reward_fn": lambda reward, text, info: reward + 3.0, "multi_turn_engine": Engine()}[sys.argv[2]]
config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
trainer = create_trainer(config, SimpleGameEnvironment(), tiny_tokenizer(), **{sys.argv[2]: given})
trainer.fit()
for _, metrics in trainer.recorder.history:
    print("STEP", json.dumps([metrics["train/episode/return_mean"], metrics["rollout/turns"]]))
"""
    path = tmp_path / "given.json"
    path.write_text(tiny_config(tmp_path).model_dump_json())
    outcome = run_python(code, str(path), how)
    assert outcome.code == 0, outcome.text[-4000:]
    steps = [
        json.loads(line.removeprefix("STEP "))
        for line in outcome.text.splitlines()
        if line.startswith("STEP ")
    ]
    assert [turns for _, turns in steps] == [1.0, 1.0]  # one reply per episode
    # A random model's reply is no move, which costs 0.1: once by the judge, twice by the engine (8
    # tokens or fewer).
    for reward, _ in steps:
        assert reward == pytest.approx(2.9) if how == "reward_fn" else reward > 0.0


@pytest.mark.parametrize("script", ["verl_agent_trainer.py", "verl_custom_trainer.py"])
def test_the_examples_run(tmp_path: Path, script: str) -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], "
        "run_name='__main__')"
    )
    outcome = run_python(code, str(ROOT / "examples" / script), str(tmp_path))
    assert outcome.code == 0, outcome.text[-4000:]
    run = RunReader(next((tmp_path / "runs").iterdir()))
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert len(rows) == 2
    assert all(row["rollout/failures"] == 0 for row in rows)
    assert rows[1]["training/rollout_actor_probs_pearson_corr"] > 0.999


def test_verls_own_command(tmp_path: Path) -> None:
    """`python -m verl.trainer.main_ppo` with our plugin and overrides fills the run directory that
    these name"""
    source = tmp_path / "given.yaml"
    source.write_text(json.dumps(tiny_config(tmp_path).model_dump(mode="json")))
    made = subprocess.run(
        [sys.executable, "-m", "turnwise.integrations.verl.overrides", str(source)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    words = [line for line in made.stdout.splitlines() if line.startswith("++")]
    code = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-m", "verl.trainer.main_ppo", *sys.argv[1:]]))
"""
    outcome = run_python(
        code,
        *words,
        "++trainer.logger=['file']",
        f"hydra.run.dir={tmp_path}/hydra",
        seconds=600,
        environment={
            "VERL_USE_EXTERNAL_MODULES": "turnwise.integrations.verl.engines.plugin",
            "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
            "VERL_PLATFORM": "cpu",
        },
    )
    assert outcome.code == 0, outcome.text[-4000:]
    rows = [
        json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    print(f"verl's command took {outcome.seconds:.0f} s")
    assert len(rows) == 2
    assert rows[1]["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert rows[1]["rollout/turns"] == 3
    assert all(row["actor/grad_norm"] > 1e-3 and row["rollout/failures"] == 0 for row in rows)
    run = RunReader(tmp_path / "runs" / "run")
    ours = [row for row in run.metrics() if "rollout/reward" in row]
    assert [row["actor/grad_norm"] for row in ours] == [row["actor/grad_norm"] for row in rows]
    assert [len(run.episodes(step)) for step in (0, 1)] == [4, 4]
    assert [entry.broken for entry in run.ledger()] == [0, 0]


def test_the_main_recipe(tmp_path: Path) -> None:
    """`turnwise train frozen_lake --backend verl model.critic=separate`: a warm start,
    mini-batches, a linear schedule"""
    words = [
        *("train", "frozen_lake", "--backend", "verl", "model.critic=separate"),
        *("train.steps=2", "rollout.train.env_groups=64", "eval.episodes=8", "train.device=cpu"),
    ]
    code = "import sys; from turnwise.cli.main import main; main(sys.argv[1:])"
    outcome = run_python(code, *words, f"log.dir={tmp_path}", "log.name=run", seconds=600)
    assert outcome.code == 0, outcome.text[-4000:]
    run = RunReader(tmp_path / "run")
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    print(f"{outcome.seconds:.0f} s; reward {[row['rollout/reward'] for row in rows]}")
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert row["rollout/episodes"] == 64
        assert row["rollout/turns"] > 1
        assert row["train/updates"] == 3 * 4
        assert row["rollout/failures"] == 0
    assert rows[0]["train/lr"] == pytest.approx(1e-3 / 5)
    assert len([row for row in run.metrics() if "eval/success" in row]) == 2
    assert [run.summary()[label]["step"] for label in ("before", "after")] == [0, 2]


def test_it_learns(tmp_path: Path) -> None:
    """The count environment: a random model learns to answer in plain characters, in three turns
    each"""
    from turnwise.config.load import load_config

    source = ROOT / "examples" / "verl_count.yaml"
    config = load_config(
        source,
        [
            f"log.dir={tmp_path}/runs",
            "log.name=run",
            f"env.name={ROOT}/examples/verl_count.py:CountEnv",
        ],
    )
    run, outcome = trained(tmp_path, config, seconds=800)
    rewards = [row["rollout/reward"] for row in run.metrics() if "rollout/reward" in row]
    print(f"{outcome.seconds:.0f} s; reward {[round(reward, 2) for reward in rewards[::5]]}")
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + 0.5
