"""Steps per second of ALFWorld: the plain engine, the original as turnwise runs it, and the
original as it is.

    python benchmarks/alfworld_speed.py [GAMES.jsonl.gz]

All play the same walk through the same games in one run; without a file, on made games. The
original is measured where the extra `alfworld` is installed; "stock" runs first in a process of its
own, before anything is made faster.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from turnwise.envs.games.alfworld import AlfWorldEnv, Game, GameMaker, load_games
from turnwise.envs.games.alfworld.check import make_engine, wander
from turnwise.envs.games.alfworld.rooms import sample_plans

GAMES, STEPS = 3, 40

STOCK = """
import json, os, sys, time
import alfworld, textworld
from textworld.envs import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

data = os.path.join(os.path.dirname(alfworld.__file__), "data")
domain, grammar = (open(os.path.join(data, name)).read() for name in ("alfred.pddl", "alfred.twl2"))
start = steps = 0.0
for problem, commands in json.load(sys.stdin):
    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)), shuffle=False)
    mark = time.process_time()
    env.load({"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem})
    env.reset()
    start += time.process_time() - mark
    mark = time.process_time()
    for command in commands:
        env.step(command)
    steps += time.process_time() - mark
print(json.dumps([start, steps]))
"""


def measure(games: Sequence[Game], *, engine: str, steps: int) -> tuple[float, float]:
    """(CPU seconds to load and reset all games, CPU seconds of all steps)."""
    start = walk = 0.0
    for game in games:
        mark = time.process_time()
        player = make_engine(game, engine=engine)
        player.reset()
        start += time.process_time() - mark
        commands = [command for command, _ in wander(game.engine(), seed=game.id, steps=steps)][1:]
        mark = time.process_time()
        for command in commands:
            player.step(command)
        walk += time.process_time() - mark
        player.close()
    return start, walk


def measure_stock(games: Sequence[Game]) -> tuple[float, float]:
    """The same for the original without any change, in a process of its own."""
    told = [
        [
            game.pddl_problem,
            [command for command, _ in wander(game.engine(), seed=game.id, steps=STEPS)][1:],
        ]
        for game in games
    ]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", STOCK],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    start, walk = json.loads(done.stdout.strip().splitlines()[-1])
    return start, walk


def measure_env(*, episodes: int) -> float:
    """Steps per CPU second of the whole environment, observation text and made games included."""
    env = AlfWorldEnv(max_steps=50)
    steps = 0
    mark = time.process_time()
    for seed in range(episodes):
        _, info = env.reset(seed=seed)
        over = False
        while not over:
            commands = info["admissible_commands"]
            _, _, terminated, truncated, info = env.step(
                commands[(seed + 7 * steps) % len(commands)]
            )
            over = terminated or truncated
            steps += 1
    return steps / (time.process_time() - mark)


def main() -> None:
    games = (
        load_games(sys.argv[1])
        if len(sys.argv) > 1
        else [GameMaker(sample_plans()).make(s, split="train") for s in range(9)]
    )
    games = list(games)[:: max(1, len(games) // GAMES)][:GAMES]
    rows = {"plain": (measure(games, engine="plain", steps=100 * STEPS), 100 * STEPS)}
    if importlib.util.find_spec("alfworld") is not None:
        rows["stock"] = (measure_stock(games), STEPS)
        rows["textworld"] = (measure(games, engine="textworld", steps=STEPS), STEPS)
    for name, ((start, walk), steps) in rows.items():
        count = steps * len(games)
        speed = f"{count / walk:10.0f} steps/s  {1e3 * walk / count:8.3f} ms/step"
        print(f"{name:10} {speed}  {1e3 * start / len(games):8.1f} ms/start")
    print(
        f"{'env, plain':10} {measure_env(episodes=40):10.0f} steps/s  (made games, text and resets "
        "included)"
    )


if __name__ == "__main__":
    main()
