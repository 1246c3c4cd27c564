"""Experts of Sokoban, WebShop and Countdown: they win, go on after mistakes, do only what a player
can do, and their demonstrations can be learned."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import turnwise
from turnwise.config import run_config
from turnwise.config.schema import EnvConfig
from turnwise.envs.games.countdown import Countdown, Puzzle
from turnwise.envs.games.countdown_math import evaluate
from turnwise.envs.games.sokoban import SokobanEnv
from turnwise.envs.games.sokoban.engine import DIRECTIONS, Board, Level
from turnwise.envs.games.sokoban.solver import SolverLimit, fewest_moves, solve
from turnwise.envs.registry import make_env
from turnwise.evaluate.baselines import ExpertPlayer
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.sources import collect, play_tasks
from turnwise.types import Message

CORNER = ["#####", "#@ .#", "# $ #", "#   #", "#####"]
"""Down twice from here pushes the box to the wall below, from where it cannot get to the target."""


def solved_by_expert(env: SokobanEnv) -> int | None:
    """How many moves the expert needs from here; None where it does not solve the board."""
    for moves in range(1, env.max_steps + 1):
        action = env.expert_action()
        if action is None:
            return None
        _, _, solved, truncated, _ = env.step(action)
        if solved:
            return moves
        if truncated:
            return None
    return None


def level_of(board: Board) -> Level:
    return Level(
        width=board.level.width,
        height=board.level.height,
        cells=bytes(board.cells),
        player=board.player,
    )


@pytest.mark.parametrize(("dim", "boxes", "seeds"), [(6, 1, 60), (6, 2, 20), (10, 4, 1)])
def test_the_sokoban_expert_solves_its_rooms(dim: int, boxes: int, seeds: int) -> None:
    env = SokobanEnv(dim=dim, num_boxes=boxes, max_steps=200)
    fewer = 0
    for seed in range(seeds):
        env.reset(seed=seed, split="val")
        few_pushes = solve(env.board.level)
        assert few_pushes is not None
        needed = solved_by_expert(env)
        assert needed is not None
        if boxes < 4:
            assert needed <= len(few_pushes)
            fewer += needed < len(few_pushes)
    assert fewer or boxes == 4, "few pushes are not always few moves"


def test_the_sokoban_expert_plans_once_and_again_where_the_play_left_its_way() -> None:
    env, rng = SokobanEnv(dim=7, num_boxes=2, max_steps=300), random.Random(0)
    lost = replanned = 0
    for seed in range(15):
        env.reset(seed=seed)
        for turn in range(60):
            action = env.expert_action()
            if action is None:
                assert solve(level_of(env.board)) is None, "it gives up only what is lost"
                lost += 1
                break
            if turn == 0:
                planned = len(env._plan)
            played = rng.choice(DIRECTIONS) if turn % 3 == 1 else action
            if env.step(played)[2]:
                break
        else:
            pytest.fail(f"room {seed} is neither solved nor lost")
        replanned += len(env._plan) > planned
    assert replanned > 5
    assert lost < 12
    env.reset(seed=1)
    env.expert_action()
    planned = len(env._plan)
    assert solved_by_expert(env) == planned == len(env._plan), "on its way it does not search again"


def test_the_sokoban_expert_knows_when_nothing_can_be_done() -> None:
    env = SokobanEnv(levels=[CORNER])
    assert env.expert_action() is None, "before an episode"
    env.reset(seed=0)
    assert env.expert_action() is not None
    env.step("Right")
    env.step("Down")
    assert env.expert_action() is None
    env.start(Level.from_rows(CORNER))
    assert env.expert_action() is not None, "another episode is planned anew"
    with pytest.raises(SolverLimit, match="first 5 states"):
        fewest_moves(Level.from_rows(CORNER), max_states=5)
    assert fewest_moves(level_of(env.board)) == fewest_moves(Level.from_rows(CORNER))


def test_several_moves_fit_into_a_turn() -> None:
    form = {"style": "answer", "think": False, "max_actions_per_turn": 4}
    config = EnvConfig.model_validate({"name": "sokoban", "max_turn": 20, "format": form})
    env = make_env(config)
    lengths: list[int] = []
    for seed in range(10):
        env.reset(env.make_task(seed, "train"))
        while True:
            reply = env.hint("expert", 0)  # type: ignore[attr-defined]
            lengths.append(reply.count("||") + 1)
            result = env.step(Message(role="assistant", content=reply))
            if result.terminated or result.truncated:
                break
        assert result.info["success"]
        assert result.info["num_actions"] == lengths[-1], "nothing is said after the last move"
    assert max(lengths) == 4


def test_a_lost_room_ends_its_episode_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    config = run_config("smollm2_sokoban_imitate", ["env.options.dim=7", "env.max_turn=30"])
    found: list[Any] = play_tasks(
        config,
        ExpertPlayer(),
        "sokoban",
        config.env,
        count=40,
        purpose="sft",
        task_seed=lambda number: number,
        slips=0.4,
    )
    assert 5 < len(found) < 40
    assert "episodes of the expert player failed" in caplog.text
    assert "the expert of 'sokoban' knows no way on after turn" in caplog.text


# WebShop


def shop(**options: Any) -> Any:
    pytest.importorskip("bm25s")
    pytest.importorskip("rapidfuzz")
    from turnwise.envs.games.webshop import WebShopEnv

    return WebShopEnv(**options)


def check_visible(env: Any, action: str) -> None:
    """Fails for an action that a player who sees the page could not know."""
    verb, _, rest = action.partition("[")
    if verb == "click":
        assert f"click[{rest}" in env.render(), "it is among the possible actions"
        return
    words = env.goal.instruction.lower()
    assert all(word in words for word in rest.rstrip("]").split()), action


def test_the_buyer_buys_what_was_asked_for() -> None:
    env = shop()
    for split, side in env.shop.goals.items():
        for number in range(len(side)):
            env.reset(split=split, goal=number)
            turns = 0
            while True:
                action = env.expert_action()
                check_visible(env, action)
                _, reward, bought, truncated, info = env.step(action)
                assert info["success"] is bought, "failed, until it has bought"
                turns += 1
                if bought or truncated:
                    break
            assert (reward, info["success"]) == (1.0, True)
            assert turns <= 3 + len(env.goal.options)


def test_the_buyer_goes_on_after_mistakes() -> None:
    env, rng = shop(max_steps=40), random.Random(1)
    pages: set[str] = set()
    for seed in range(80):
        env.reset(seed=seed)
        slipped = False
        for turn in range(40):
            slipped = turn % 2 == 1 and turn < 12
            action = env.random_action(rng) if slipped else env.expert_action()
            if slipped and action == "click[buy now]":
                action = "click[back to search]"
            if not slipped:
                check_visible(env, action)
                pages.add(env._name)
            _, reward, bought, truncated, _ = env.step(action)
            if bought or truncated:
                break
        assert (bought, reward) == (True, 1.0)
    assert pages == {"search", "results", "item", "sub"}


def test_the_buyer_looks_further_where_nothing_fits() -> None:
    """Page after page, then with other words, and never twice with the same."""
    env = shop(max_steps=12)
    env.reset(seed=3)
    wish = replace(env.goal, price_limit=0.01, instruction="find me a set of any color and size")
    from turnwise.envs.games.webshop.buyer import Buyer, queries

    env._goal, env._buyer = wish, Buyer(env.shop, wish)
    env._show_search()
    said: list[str] = []
    for _ in range(12):
        said.append(env.expert_action())
        check_visible(env, said[-1])
        if env.step(said[-1])[3]:
            break
    assert said[0] == f"search[{queries(wish)[0]}]"
    assert "click[next >]" in said
    assert "click[buy now]" not in said
    assert env.expert_action() is None, "the episode is over"


def test_copies_of_an_environment_shop_in_the_same_shop() -> None:
    env = shop()
    env.reset(seed=0)
    other = copy.deepcopy(env)
    assert other.shop is env.shop
    other.step(other.expert_action())
    assert env.expert_action().startswith("search[")
    assert other.expert_action().startswith("click[")


# Countdown


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
def test_the_countdown_expert_hits_every_target(operators: str) -> None:
    env = Countdown(min_numbers=2, max_numbers=5, operators=operators)
    assert env.expert_action() is None, "no puzzle yet"
    for seed in range(200):
        env.reset(seed=seed)
        action = env.expert_action()
        assert action is not None
        assert env.step(action)[3]["success"]


def test_the_countdown_expert_thinks_what_leads_to_its_answer() -> None:
    env, searched = Countdown(min_numbers=4, max_numbers=4, operators="+-"), 0
    for seed in range(100):
        env.reset(seed=seed)
        tries = [attempt.split("=") for attempt in (env.expert_thought() or "").split(", ")]
        assert all(evaluate(left).result == int(value) for left, value in tries)
        assert len({left for left, _ in tries}) == len(tries) <= 15
        assert tries[-1] == [env.expert_action(), str(env.puzzle.target)]
        searched += len(tries)
    assert searched > 300, "most targets are not the first try"
    env.puzzle = Puzzle(numbers=(3, 5, 2), target=16, solution="(3 + 5) * 2")
    assert (env.expert_action(), env.expert_thought()) == ("(3 + 5) * 2", None)


# Learned


@pytest.mark.parametrize(
    "recipe",
    [
        "smollm2_sokoban_imitate",
        "qwen_1_5b_webshop",
        "qwen_1_5b_countdown_think",
    ],
)
def test_demonstrations_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    if "webshop" in recipe:
        shop()
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    overrides = {
        "sft.episodes": 6,
        "sft.epochs": 2,
        "sft.lr": 0.01,
        "sft.held_out": 0.3,
        "rollout.max_context": 4096,
        "rollout.slots": 2,
        "eval.episodes": 1,
        "eval.baselines": False,
        "eval.before": False,
        "eval.after": False,
        "train.device": "cpu",
        "train.compile": False,
        "log.report": False,
        "log.name": "run",
    }
    run = turnwise.sft(
        "expert", config=recipe, model=tmp_path / "model", overrides=overrides, quiet=True
    )
    rows = [row for row in run.metrics() if "sft/held_out_loss" in row]
    assert rows[-1]["sft/held_out_loss"] < rows[0]["sft/held_out_loss"]
    shown = collect(run_config(recipe, ["sft.episodes=6", "sft.slips=0"]), factories={}, say=print)
    assert {episode.success for episode in shown} == {True}
