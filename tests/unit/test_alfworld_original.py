"""The plain ALFWorld engine against the original: by recorded digests always, side by side where it
is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from alfworld_record import DIGESTS, transcripts

from turnwise.envs.games.alfworld import AlfWorldEnv, GameMaker, check_games, load_games
from turnwise.envs.games.alfworld.check import digest, follow, make_engine, wander
from turnwise.envs.games.alfworld.games import Game
from turnwise.envs.games.alfworld.planner import find_plan
from turnwise.envs.games.alfworld.rooms import load_plans, sample_plans

DATA = (
    Path(os.environ.get("TURNWISE_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
    / "alfworld"
)
GAMES = DATA / "real_games.jsonl.gz"
ORIGINAL = importlib.util.find_spec("alfworld") is not None

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared data is not here")
needs_original = pytest.mark.skipif(not ORIGINAL, reason="the extra alfworld is not installed")

STOCK = """
import hashlib, json, os, sys
import alfworld, textworld
from textworld.envs import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

problem, task, commands = json.load(sys.stdin)
data = os.path.join(os.path.dirname(alfworld.__file__), "data")
domain, grammar = (open(os.path.join(data, name)).read() for name in ("alfred.pddl", "alfred.twl2"))
env = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)), shuffle=False)
env.load({"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", task), "pddl_problem": problem})
state = env.reset()
seen = hashlib.sha256()
for command in ["", *commands]:
    if command:
        state, _, _ = env.step(command)
    row = [command, state.feedback, state["admissible_commands"], bool(state["won"])]
    seen.update(json.dumps(row).encode() + b"\\n")
print(seen.hexdigest()[:32])
"""


@needs_data
def test_all_walkthroughs_reach_their_goal() -> None:
    report = check_games(GAMES)
    assert report.ok, report.lines()
    assert report.num_games == report.num_reached == 144


@needs_data
def test_what_is_shown_equals_what_the_original_showed() -> None:
    recorded = json.loads(DIGESTS.read_text(encoding="utf-8"))
    games = load_games(GAMES)
    assert sorted(recorded) == sorted(game.id for game in games)
    different = [
        game.id for game in games if transcripts(game, engine="plain") != recorded[game.id]
    ]
    assert not different


@needs_data
def test_the_planner_wins_all_games() -> None:
    for game in load_games(GAMES):
        plan = find_plan(game)
        assert plan is not None
        assert len(plan) <= len(game.walkthrough), game.id


@needs_data
def test_splits_of_the_file_are_kept_apart() -> None:
    env = AlfWorldEnv(games=str(GAMES))
    seen = {
        split: {env.reset(seed=seed, split=split)[1]["game"] for seed in range(90)}
        for split in ("train", "val")
    }
    assert (len(seen["train"]), len(seen["val"])) == (54, 90)
    assert not seen["train"] & seen["val"]


@pytest.mark.skipif(ORIGINAL, reason="the extra alfworld is installed")
def test_without_the_original_the_error_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"turnwise\[alfworld\]"):
        AlfWorldEnv(engine="textworld")


def first_difference(game: Game, *, seed: str, steps: int) -> tuple[str | None, int]:
    """(what the two engines first disagree on, or None; the commands compared) over the walkthrough
    and a random walk.

    Texts, commands, whether the game is won and the state's name are compared after every command.
    """
    plain, original = make_engine(game, engine="plain"), make_engine(game, engine="textworld")
    compared = 0
    try:
        for ours, theirs in (
            (follow(plain, game.walkthrough), follow(original, game.walkthrough)),
            (wander(plain, seed=seed, steps=steps), wander(original, seed=seed, steps=steps)),
        ):
            for (command, left), (_, right) in zip(ours, theirs, strict=True):
                compared += bool(command)
                if left != right or plain.state_key() != original.state_key():
                    return (
                        f"{game.id}, after {command!r}: plain {left!r}, textworld {right!r}",
                        compared,
                    )
    finally:
        original.close()
    return None, compared


@pytest.mark.slow
@needs_original
def test_made_games_are_the_same_in_both_engines() -> None:
    arguments = list(sys.argv)
    maker = GameMaker(sample_plans())
    for seed in range(6):
        difference, compared = first_difference(
            maker.make(seed, split="train"), seed="walk", steps=20
        )
        assert difference is None
        assert compared > 20
    assert sys.argv == arguments


@pytest.mark.slow
@needs_original
@needs_data
def test_games_are_the_same_in_both_engines() -> None:
    for game in load_games(GAMES)[::24]:
        difference, _ = first_difference(game, seed="another walk", steps=30)
        assert difference is None
    for seed in range(3):
        game = GameMaker(load_plans(DATA / "floorplans.json.gz")).make(seed, split="val")
        assert first_difference(game, seed="walk", steps=20)[0] is None


@pytest.mark.slow
@needs_original
def test_what_makes_the_original_fast_changes_nothing() -> None:
    game = GameMaker(sample_plans()).make(1, split="train")
    commands = ("look", *game.walkthrough, "inventory", "nonsense", "help")
    told = json.dumps([game.pddl_problem, game.task(), commands])
    stock = subprocess.run(
        [sys.executable, "-c", STOCK],
        input=told,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    quick = make_engine(game, engine="textworld")
    assert digest(follow(quick, commands)) == stock.stdout.strip().splitlines()[-1]
    quick.close()


@pytest.mark.slow
@needs_original
def test_env_plays_the_original() -> None:
    env = AlfWorldEnv(engine="textworld")
    plain = AlfWorldEnv()
    assert env.reset(seed=2) == plain.reset(seed=2)
    assert env.state_key() == plain.state_key()
    for command in env.walkthrough() or ():
        assert env.step(command) == plain.step(command)
    env.close()
