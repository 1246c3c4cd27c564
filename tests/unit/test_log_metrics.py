"""Metrics: rollouts counted by hand, every name defined in the docs."""

import re
from pathlib import Path

import pytest
from run_fixtures import make_episode, make_turn

from turnwise.log.metrics import rollout_metrics, rollout_timings
from turnwise.types import Completion, Episode, Status

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def rollout() -> list[Episode]:
    cut = Completion(ids=(5, 5, 5, 5), logprobs=(-1.0,) * 4, finish_reason="length")
    return [
        make_episode(
            "a",
            group_id=0,
            turns=(make_turn("up", state="s1", restart=True), make_turn("up", state="s2")),
        ),
        make_episode("b", group_id=0, success=True),
        make_episode("c", group_id=1, success=False, tag="maze"),
        make_episode("d", group_id=1, success=False, status=Status.TRUNCATED_TURNS, attempts=3),
        make_episode(
            "e",
            group_id=2,
            turns=(
                make_turn(
                    "?",
                    action=None,
                    completion=cut,
                    reward=-0.5,
                    reward_parts={"env": 0.0, "format": -0.5},
                ),
            ),
        ),
        make_episode(
            "f",
            group_id=2,
            turns=(make_turn("up", reward=99.0),),
            status=Status.ENV_ERROR,
            error="boom",
        ),
    ]


def test_a_rollout_counted_by_hand() -> None:
    found = rollout_metrics(rollout())
    expected = {
        "rollout/episodes": 5,
        "rollout/failures": 1,
        "rollout/retries": 2,
        "rollout/status/completed": 4 / 6,
        "rollout/status/env_error": 1 / 6,
        "rollout/reward": 0.1,  # (0 + 1 + 0 + 0 - 0.5) / 5: the failure's 99 is nowhere
        "rollout/reward_std": 0.24**0.5,  # squared distances from 0.1: 3 * 0.01 + 0.81 + 0.36
        "rollout/reward_max": 1.0,
        "rollout/reward_min": -0.5,
        "rollout/reward/format": -0.1,
        "rollout/success": 1 / 5,  # a and e heard nothing, in a lake that speaks of success
        "rollout/success/lake": 1 / 4,
        "rollout/success/maze": 0.0,
        "rollout/turns": 6 / 5,
        "rollout/tokens": 5 * 3 + 4,
        "rollout/prompt_tokens": 6 * 2,
        "rollout/groups": 3,
        "rollout/zero_variance_groups": 1
        / 2,  # group 0: 0 and 1; group 1: 0 and 0; group 2 has one member
        "rollout/group_reward_std": 0.25,
        "rollout/format_valid": 5 / 6,
        "rollout/cut_replies": 1 / 6,
        "rollout/distinct_replies": 2 / 6,
        "rollout/top_reply": 5 / 6,
        "rollout/distinct_states": 3 / 6,
        "rollout/logprob": -(5 * 1.5 + 4) / 19,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_one_reply_in_each_environment_and_of_each_role_is_one_reply() -> None:
    two = tuple(make_turn(text, role=text) for text in ("ask", "tell", "ask"))
    found = rollout_metrics(
        [make_episode(tag="lake"), make_episode(tag="house", turns=(make_turn("look"),) * 3)]
        + [make_episode(tag="team", turns=two)] * 2
    )
    assert found["rollout/top_reply"] == 1.0
    assert found["rollout/distinct_replies"] == 4 / 10


def test_only_failures_make_no_rewards() -> None:
    found = rollout_metrics([make_episode(turns=(), status=Status.ENV_TIMEOUT, error="slow")])
    assert found["rollout/status/env_timeout"] == 1.0
    assert "rollout/reward" not in found


def test_every_metric_of_a_rollout_is_defined_in_the_docs() -> None:
    defined = re.findall(r"^\| `([^`]+)`", DOCS.read_text(), flags=re.MULTILINE)
    patterns = [re.compile(re.sub(r"<\w+>", "[^/]+", name) + "$") for name in defined]
    emitted = [*rollout_metrics(rollout()), *rollout_timings(rollout())]
    missing = [name for name in emitted if not any(pattern.match(name) for pattern in patterns)]
    assert not missing
    assert len(set(defined)) == len(defined)


def test_episode_without_a_legal_reply_counts_as_failed_where_others_speak_of_success() -> None:
    from turnwise.log.metrics import successes

    silent, lost, won = (make_episode(tag="lake", success=value) for value in (None, False, True))
    other = make_episode(tag="chat", success=None)
    assert successes([silent, lost, won, other]) == [False, False, True, None]
    assert successes([silent, silent]) == [None, None]
