"""The doctor: every diagnosis fires on the run that has it, and none on a healthy one."""

from pathlib import Path

import pytest
from run_fixtures import fill_step, make_episode, make_run

from turnwise.config.schema import AlgoConfig, Config, TrainConfig
from turnwise.log.doctor import CHECKS, Chart, diagnose, read_chart
from turnwise.log.events import Evaluated
from turnwise.log.machine import describe, look_around
from turnwise.log.metrics import is_collapsed, rollout_metrics
from turnwise.log.outcome import summary_json
from turnwise.log.store import LedgerEntry, RunReader
from turnwise.log.terminal.follow import Follower
from turnwise.types import Status

HEALTHY = {
    "rollout/episodes": 128.0,
    "rollout/failures": 0.0,
    "rollout/retries": 0.0,
    "rollout/success": 0.5,
    "rollout/reward": 0.4,
    "rollout/turns": 3.0,
    "rollout/zero_variance_groups": 0.2,
    "rollout/format_valid": 0.95,
    "rollout/cut_replies": 0.01,
    "rollout/reply_tokens": 20.0,
    "rollout/top_reply": 0.2,
    "rollout/distinct_states": 0.4,
    "rollout/observation_information": 0.4,
    "rollout/logprob": -0.5,
    "rollout/thought_empty": 0.1,
    "rollout/thought_copied": 0.1,
    "rollout/thought_distinct": 0.8,
    "rollout/status/truncated_turns": 0.3,
    "train/entropy": 0.5,
    "train/idle": 0.0,
    "train/clip_fraction": 0.1,
    "train/approx_kl": 0.01,
    "train/gap_mean": 1e-6,
    "train/gap_max": 1e-5,
    "critic/explained_variance": 0.6,
}
FIRST = {
    "success": [0.1, 0.2, 0.3],
    "reward": [0.0, 0.1, 0.2],
    "step": 0,
    "label": "before",
    "episodes": 64,
}
SUMMARY = {"before": FIRST, "after": {**FIRST, "success": [0.5, 0.6, 0.7]}}


def chart(*, name: str = "grpo", last: dict[str, float] | None = None, **changes: object) -> Chart:
    """A healthy run of 50 steps whose last 25 steps are changed."""
    later = {**HEALTHY, **(last or {})}
    curves = {metric: [HEALTHY[metric]] * 25 + [later[metric]] * 25 for metric in HEALTHY}
    config = Config(algo=AlgoConfig(name=name), train=TrainConfig(steps=50))  # pyright: ignore[reportArgumentType]
    fields: dict[str, object] = {
        "config": config,
        "steps": 50,
        "curves": curves,
        "summary": SUMMARY,
        **changes,
    }
    return Chart(**fields)  # pyright: ignore[reportArgumentType]


BROKEN = LedgerEntry(
    step=4,
    sampled=2,
    trained=2,
    sampled_sha256="a",
    trained_sha256="b",
    broken=1,
)
BLIND = {"label": "baseline", "player": "best blind player", "success": [0.5, 0.55, 0.6]}
SAME = {"before": FIRST, "after": FIRST}
WORSE = {"before": SUMMARY["after"], "after": FIRST}
ILL: dict[str, tuple[Chart, ...]] = {
    "token_fidelity": (chart(ledger=(BROKEN,)),),
    "not_finite": (chart(not_finite={"train/x": 3, "train/y": 4}),),
    "collapsed": (chart(last={"rollout/top_reply": 1.0, "rollout/success": 0.0}, collapsed=5),),
    "zero_variance_groups": (chart(last={"rollout/zero_variance_groups": 0.9}),),
    "idle_steps": (chart(last={"train/idle": 1.0}),),
    "template_collapse": (chart(last={"rollout/top_reply": 0.95}),),
    "blind_policy": (chart(last={"rollout/observation_information": 0.01}),),
    "no_better_than_blind": (chart(summary={**SUMMARY, "baselines": [BLIND]}),),
    "entropy_gone": (chart(last={"train/entropy": 0.001}),),
    "length_growth": (
        chart(last={"rollout/reply_tokens": 90.0}),
        chart(last={"rollout/cut_replies": 0.6}),
    ),
    "format_collapse": (chart(last={"rollout/format_valid": 0.3}),),
    "empty_thoughts": (chart(last={"rollout/thought_empty": 0.7}),),
    "copied_thoughts": (chart(last={"rollout/thought_copied": 0.7}),),
    "critic_useless": (chart(last={"critic/explained_variance": -0.1}),),
    "sampler_mismatch": (chart(last={"train/gap_mean": 0.2}),),
    "environment_failures": (chart(last={"rollout/failures": 30.0}),),
    "turn_limit": (chart(last={"rollout/status/truncated_turns": 0.9}),),
    "large_updates": (
        chart(last={"train/approx_kl": 0.5}),
        chart(last={"train/clip_fraction": 0.5}),
    ),
    "no_improvement": (chart(summary=SAME), chart(summary=WORSE)),
    "unfinished": (chart(summary={}, steps=20),),
}
"""Every diagnosis, with charts of runs that have it and nothing else."""


def test_a_healthy_run_has_nothing() -> None:
    assert diagnose(chart()) == []


def test_every_check_has_a_chart() -> None:
    assert list(ILL) == [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("name", ILL)
def test_each_is_found_alone(name: str) -> None:
    for ill in ILL[name]:
        (found,) = diagnose(ill)
        assert found.name == name
        assert found.evidence
        assert found.advice


@pytest.mark.parametrize("name", sorted(ILL.keys() - {"token_fidelity", "unfinished"}))
def test_each_names_the_curves_that_it_was_read_from(name: str) -> None:
    for ill in ILL[name]:
        (found,) = diagnose(ill)
        assert found.metrics
        changed = {metric for metric, values in ill.curves.items() if values[0] != values[-1]}
        assert set(found.metrics) >= changed
        known = {*HEALTHY, "eval/success", "eval/reward", "train/x", "train/y"}
        assert set(found.metrics) <= known


def test_what_is_said_of_those_that_are_not_curves() -> None:
    assert "train/x in step 3" in diagnose(ILL["not_finite"][0])[0].evidence
    severities = [diagnose(ill)[0].severity for ill in ILL["no_improvement"]]
    assert severities == ["warning", "problem"]


LOST = {
    "rollout/success": 0.0,
    "rollout/top_reply": 0.95,
    "rollout/turns": 2.0,
    "rollout/episodes": 8.0,
    "rollout/format_valid": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, True),
        ({"rollout/top_reply": 0.94}, False),
        ({"rollout/success": 0.01}, False),
        ({"rollout/success": None}, False),
        ({"rollout/success": None, "rollout/format_valid": 0.0}, True),
        ({"rollout/episodes": 3.0}, False),
        ({"rollout/top_reply": None}, False),
    ],
)
def test_what_a_collapsed_step_is(changes: dict[str, float | None], lost: bool) -> None:
    assert is_collapsed({**LOST, **changes}) is lost


@pytest.mark.parametrize(("steps", "found"), [(4, []), (5, ["collapsed"])])
def test_five_collapsed_steps_in_a_row_are_said(
    steps: int, found: list[str], tmp_path: Path
) -> None:
    with make_run(tmp_path, config=Config(train=TrainConfig(steps=9))) as run:
        run.write_metrics(0, {"eval/success": 0.0})
        run.write_metrics(1, HEALTHY)
        for step in range(2, 2 + steps):
            run.write_metrics(step, LOST)
            run.write_metrics(step, {"eval/success": 0.0})
        run.write_summary(SUMMARY)
    reader = RunReader(run.path)
    chosen = [one for one in diagnose(read_chart(reader)) if "collapse" in one.name]
    assert [one.name for one in chosen] == found
    if found:
        assert "every reply is the same and nothing succeeds" in chosen[0].evidence
    follower = Follower(reader)
    follower.look()
    assert follower.view.chart().collapsed == steps


def test_a_collapse_is_said_before_what_follows_from_it(tmp_path: Path) -> None:
    with make_run(tmp_path, config=Config(train=TrainConfig(steps=9))) as run:
        for step in range(1, 6):
            run.write_metrics(step, {**LOST, "rollout/zero_variance_groups": 1.0, "train/idle": 1})
    found = [one.name for one in diagnose(read_chart(RunReader(run.path)))]
    assert found[0] == "collapsed"
    assert {"zero_variance_groups", "idle_steps"} < {*found}


def test_a_solved_task_is_no_collapse() -> None:
    solved = {
        "rollout/success": 0.97,
        "rollout/zero_variance_groups": 0.95,
        "rollout/top_reply": 0.9,
    }
    found = diagnose(chart(last={**solved, "train/entropy": 0.001}))
    assert {one.severity for one in found} == {"note"}


def test_one_reply_in_one_state_is_no_collapse() -> None:
    assert (
        diagnose(chart(last={"rollout/top_reply": 1.0, "rollout/distinct_states": 1 / 384})) == []
    )


def test_zero_variance_is_graver_without_a_critic() -> None:
    last = {"rollout/zero_variance_groups": 0.9}
    severities = [
        diagnose(chart(name=name, last=last))[0].severity for name in ("grpo", "bi_level_gae")
    ]
    assert severities == ["problem", "warning"]


def test_from_a_real_run_directory(tmp_path: Path) -> None:
    with make_run(tmp_path, config=Config(train=TrainConfig(steps=3))) as run:
        for step in range(3):
            failed = make_episode(
                "f", turns=(), status=Status.ENV_ERROR, error="ValueError: the maze is gone"
            )
            episodes = [
                make_episode(f"{step}{n}", group_id=n // 2, index=n % 2, success=False)
                for n in range(4)
            ]
            episodes.append(failed)
            fill_step(
                run, step, episodes, {**rollout_metrics(episodes), "train/loss": float("nan")}
            )
        run.write_event("single_turn_fallback", "MULTI-TURN TRAINING IS OFF")
        run.write_event("resume", "from step 1", step=1)
        event = Evaluated(
            step=0, label="before", episodes=4, success=(0.0, 0.0, 0.5), reward=(0.0, 0.0, 0.0)
        )
        run.write_summary(summary_json(event, event))
    found = {one.name: one for one in diagnose(read_chart(RunReader(tmp_path / "run")))}
    assert {
        "zero_variance_groups",
        "environment_failures",
        "not_finite",
        "single_turn_fallback",
        "resume",
    } <= set(found)
    assert "3 x env_error: ValueError: the maze is gone" in found["environment_failures"].evidence
    assert found["single_turn_fallback"].severity == "problem"


def test_this_machine_can_be_described() -> None:
    machine = look_around()
    assert machine.cores >= 1
    assert 0 < machine.free_memory <= machine.memory
    text = "\n".join(describe(machine))
    assert "train the embedded model" in text
    assert "MISSING" in text or all(
        version for _, packages in machine.extras for _, version in packages
    )
