"""Groups that differ by nothing but penalties: which they are, and that nothing is learned from
them."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import make_episode, make_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "learning"))

from small_runs import TINY, small_config

from turnwise.algos.credit import compute_advantages
from turnwise.algos.filters import filter_groups
from turnwise.algos.table import PRESETS, build_algorithm
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import collate
from turnwise.data.penalties import penalty_only_groups, without_penalties
from turnwise.data.samples import episode_to_samples
from turnwise.train.run import train
from turnwise.train.step import credited
from turnwise.types import Episode

Parts = dict[str, float]


def episode(name: str, *turns: Parts, group: int = 0, success: bool | None = None) -> Episode:
    info = {} if success is None else {"success": success}
    played = tuple(
        make_turn(
            reward=sum(parts.values()), reward_parts=parts, info=info, role=role, restart=True
        )
        for parts in turns
        for role in ("",)
    )
    return make_episode(name, turns=played, group_id=group)


OK, BAD = {"env": 0.0}, {"env": 0.0, "format": -0.1}


@pytest.mark.parametrize(
    ("members", "only"),
    [
        ([[OK], [BAD]], True),
        ([[OK, BAD], [BAD, BAD], [OK, OK]], True),
        ([[BAD], [BAD]], False),  # no variance at all
        ([[BAD]], False),  # alone
        ([[OK], [{"env": 0.2}]], False),  # another reward
        ([[{"env": 0.2}], [{"env": 0.2, "format": -0.1}]], False),  # something was reached
        ([[{"env": -0.5}], [{"env": -0.5, "format": -0.1}]], True),  # the same cost for all
        ([[{"env": -0.5}], [{"env": 0.0, "format": -0.1}]], False),
        ([[OK], [{"env": 0.0, "format": 0.1}]], False),  # a reward for the format
        ([[OK | {"turn_cost": -0.1}], [BAD | {"turn_cost": -0.1}]], True),
        ([[OK], [OK | {"turn_cost": -0.1}, BAD]], False),
        ([[OK], [{"env": 0.0, "format": -2.0, "clip": 1.0}]], True),  # clipped for the penalty
        ([[{}], [{}]], False),
    ],
)
def test_which_groups_differ_by_nothing_but_penalties(
    members: list[list[Parts]], only: bool
) -> None:
    group = [episode(f"e{index}", *turns) for index, turns in enumerate(members)]
    assert penalty_only_groups(group) == ({(0, "")} if only else set())


def test_a_success_speaks_for_its_whole_group() -> None:
    lost = [episode("a", OK, success=False), episode("b", BAD)]
    assert penalty_only_groups(lost)
    assert not penalty_only_groups([*lost, episode("c", OK, success=True)])


def test_roles_are_groups_of_their_own() -> None:
    def two(name: str, first: Parts, second: Parts) -> Episode:
        turns = tuple(
            make_turn(reward=sum(parts.values()), reward_parts=parts, role=role)
            for role, parts in (("asks", first), ("answers", second))
        )
        return make_episode(name, turns=turns)

    pair = [two("a", OK, {"env": 1.0}), two("b", BAD, {"env": 0.0})]
    assert penalty_only_groups(pair) == {(0, "asks")}
    kept = without_penalties(pair[1], {(0, "asks")})
    assert [turn.reward for turn in kept.turns] == [0.0, 0.0]
    assert without_penalties(pair[1], set()) is pair[1]


PARTS = st.lists(st.sampled_from([OK, BAD, {"env": 1.0}]), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 2), PARTS), min_size=2, max_size=8))
@examples(60)
def test_it_agrees_with_a_loop_over_pairs(drawn: list[tuple[int, list[Parts]]]) -> None:
    episodes = [episode(f"e{i}", *turns, group=group) for i, (group, turns) in enumerate(drawn)]
    wanted = set[tuple[int, str]]()
    for group in {one.group_id for one in episodes}:
        members = [one for one in episodes if one.group_id == group]
        paid = [sum(turn.reward_parts["env"] for turn in one.turns) for one in members]
        bad = [sum(turn.reward_parts == BAD for turn in one.turns) for one in members]
        if not any(paid) and any(a != b for a, b in itertools.pairwise(bad)):
            wanted.add((group, ""))
    assert penalty_only_groups(episodes) == wanted


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].compares_groups])
def test_such_a_group_has_no_advantage_and_others_keep_theirs(name: str) -> None:
    others = [episode("c", {"env": 1.0}, group=1), episode("d", BAD, group=1)]
    flat = [episode("a", OK, BAD), episode("b", BAD, BAD)]

    def advantages(episodes: list[Episode], **changes: str) -> torch.Tensor:
        algorithm = build_algorithm(AlgoConfig.model_validate({"name": name, **changes}))
        counted, found = credited(episodes, algorithm)
        assert found["group/penalty_only"] == float(flat[0] in episodes)
        samples = [one for episode in counted for one in episode_to_samples(episode)]
        batch, _ = compute_advantages(collate(samples), algorithm)
        assert batch.advantages is not None
        rows = torch.tensor([sample.group_id for sample in samples])
        dropped = filter_groups(collate(samples), algorithm)[1]["filter/zero_variance_groups"]
        assert dropped == float(flat[0] in episodes and not changes)
        return torch.stack(
            [batch.advantages[rows == group].sum(-1).abs().sum() for group in (0, 1)]
        )

    alone, both = advantages(others), advantages([*flat, *others])
    assert alone[1] > 0
    torch.testing.assert_close(both, alone, rtol=0, atol=0)
    assert advantages([*flat, *others], penalty_only_groups="train")[0] > 0


def test_it_means_nothing_without_groups() -> None:
    with pytest.raises(ValueError, match=r"algo.penalty_only_groups='train' means nothing"):
        build_algorithm(AlgoConfig(name="ppo", penalty_only_groups="train"))
    episodes = [episode("a", OK), episode("b", BAD)]
    assert credited(episodes, PRESETS["ppo"]) == (episodes, {})


@pytest.mark.parametrize(("choice", "idle"), [(None, 1.0), ("train", 0.0)])
def test_a_run_learns_nothing_from_penalties_unless_asked(
    choice: str | None, idle: float, tmp_path: Path
) -> None:
    config = small_config(
        tmp_path,
        env={"name": "learn_envs:Hopeless", "options": {}},
        algo={"name": "grpo", "penalty_only_groups": choice},
        model={"embedded": {**TINY, "warmstart_episodes": 64}},
        train={"steps": 1, "max_turn": 1},
        eval={"before": False, "after": False},
    )
    (row,) = [row for row in train(config, sinks=()).metrics() if row["step"] == 1]
    assert row["group/penalty_only"] >= 1.0, "some replies have the action and some have not"
    assert row["train/idle"] == idle
    assert row["rollout/reward"] < 0.0, "what is stored has the penalties"
