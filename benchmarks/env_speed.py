"""Steps per second of the environments, beside gym-sokoban, gymnasium and textworld where they are
installed.

    python benchmarks/env_speed.py [--seconds 1.0] [--peers DIR] [--data DIR] [--json FILE]

A random player in one process. `--peers` is a directory made by `pip install --target DIR`
(gym-sokoban wants its own old packages, so it is best kept out of the environment); `--data` is a
directory with a `webshop/` folder of real products. What is not installed is listed as absent, not
left out.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rates = tuple[float, float]
"""Steps per second by the clock, and per second of processor time, which other programs do not
disturb."""
Measure = Callable[[float], Rates]


def loop(step: Callable[[], object], seconds: float) -> Rates:
    """Steps per second of calling `step` again and again, in blocks so that the clock costs
    nothing."""
    count, block = 0, 1
    start, cpu_start = time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        begin = time.perf_counter()
        for _ in range(block):
            step()
        count += block
        if time.perf_counter() - begin < 0.01:
            block *= 2
    return count / elapsed, count / max(time.process_time() - cpu_start, 1e-9)


def sokoban_engine(seconds: float) -> Rates:
    from turnwise.envs.games.sokoban import Board, RoomSpec, make_room

    board = Board(make_room(RoomSpec(), seed=0))
    rng = random.Random(0)
    moves = iter([rng.randrange(4) for _ in range(1_000_000)] * 1000)
    return loop(lambda: board.move(next(moves)), seconds)


def player(env: Any, actions: Callable[[Any, random.Random], str]) -> Callable[[], None]:
    """One step of a random player that starts the next of 64 seeds when an episode ends."""
    rng = random.Random(0)
    seed = 0
    env.reset(seed=0)

    def step() -> None:
        nonlocal seed
        result = env.step(actions(env, rng))
        if result[2] or (len(result) == 5 and result[3]):
            seed = (seed + 1) % 64
            env.reset(seed=seed)

    return step


def own(make: Callable[[], Any], actions: Callable[[Any, random.Random], str]) -> Measure:
    def measure(seconds: float) -> Rates:
        env = make()
        step = player(env, actions)
        for _ in range(200):
            step()
        return loop(step, seconds)

    return measure


def choice(env: Any, rng: random.Random) -> str:
    return rng.choice(env.actions)


def sokoban(**options: Any) -> Measure:
    def make() -> Any:
        from turnwise.envs.games.sokoban import SokobanEnv

        return SokobanEnv(**options)

    return own(make, choice)


def named(name: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        from turnwise.envs.registry import make

        return make(name, options)

    return build


def legal(env: Any, rng: random.Random) -> str:
    return env.random_action(rng)


def frozen_lake_gymnasium(seconds: float) -> Rates:
    import gymnasium

    env = gymnasium.make("FrozenLake-v1")
    env.reset(seed=0)
    rng = random.Random(0)

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(rng.randrange(4))
        if terminated or truncated:
            env.reset()

    return loop(step, seconds)


def gym_sokoban(mode: str) -> Measure:
    """gym-sokoban's own class: gym.make wraps it in a checker that fails with NumPy 2.

    A solved room is put back as it was, because making a new one takes milliseconds and is not a
    step.
    """

    def measure(seconds: float) -> Rates:
        import numpy
        from gym_sokoban.envs.sokoban_env import SokobanEnv

        random.seed(0)
        numpy.random.seed(0)
        env = SokobanEnv(dim_room=(6, 6), num_boxes=1, max_steps=10**9)
        start, place = env.room_state.copy(), env.player_position.copy()
        rng = random.Random(0)

        def step() -> None:
            if env.step(rng.randrange(1, 5), observation_mode=mode)[2]:
                env.room_state, env.player_position, env.boxes_on_target = (
                    start.copy(),
                    place.copy(),
                    0,
                )

        return loop(step, seconds)

    return measure


def textworld(seconds: float) -> Rates:
    import tempfile

    import textworld as tw

    with tempfile.TemporaryDirectory() as folder:
        options = tw.GameOptions()
        options.seeds, options.path = 1, os.path.join(folder, "game.z8")
        file, _ = tw.make(options)
        env = tw.start(file, tw.EnvInfos(admissible_commands=True))
        state = env.reset()
        rng = random.Random(0)

        def step() -> None:
            nonlocal state
            state, _, done = env.step(rng.choice(state["admissible_commands"]))
            if done:
                state = env.reset()

        return loop(step, seconds)


def math_qa() -> Any:
    from turnwise.envs.games.math_qa import MathQAEnv

    return MathQAEnv(max_tries=4)


def web_shop(data: Path | None) -> Callable[[], Any]:
    def make() -> Any:
        from turnwise.envs.games.webshop import WebShopEnv

        return WebShopEnv() if data is None else WebShopEnv(products=data / "webshop")

    return make


def browse(env: Any, rng: random.Random) -> str:
    if env.has_search_bar and rng.random() < 0.5:
        return f"search[{env.goal.instruction}]"
    return f"click[{rng.choice(env.clickables)}]" if env.clickables else "search[shirt]"


def measures(data: Path | None) -> dict[str, Measure]:
    return {
        "sokoban 6x6, engine": sokoban_engine,
        "sokoban 6x6, grid text": sokoban(),
        "sokoban 6x6, grid and coordinates": sokoban(observation="grid_coord"),
        "gym-sokoban 6x6, its default picture": gym_sokoban("rgb_array"),
        "gym-sokoban 6x6, its fastest (tiny picture)": gym_sokoban("tiny_rgb_array"),
        "bandit": own(named("bandit"), choice),
        "simple_game": own(named("simple_game"), choice),
        "countdown": own(
            named("countdown"), lambda env, rng: f"{rng.randrange(9)} + {rng.randrange(9)}"
        ),
        "frozen_lake, text": own(named("frozen_lake"), choice),
        "gymnasium FrozenLake-v1": frozen_lake_gymnasium,
        "math_qa, exact answers": own(math_qa, lambda env, rng: str(rng.randrange(1000))),
        "webshop, text pages": own(web_shop(data), browse),
        "alfworld, plain engine": own(named("alfworld"), legal),
        "alfworld, original engine (textworld)": own(named("alfworld", engine="textworld"), legal),
        "textworld, a generated game": textworld,
    }


def compare(results: dict[str, Rates | None]) -> None:
    """Prints how many times faster Sokoban is than gym-sokoban, by processor time."""
    peers = [
        rates[1] for name, rates in results.items() if name.startswith("gym-sokoban") and rates
    ]
    for name in ("sokoban 6x6, engine", "sokoban 6x6, grid text"):
        rates = results[name]
        if peers and rates:
            fast, slow = rates[1] / max(peers), rates[1] / min(peers)
            print(
                f"{name}: {fast:,.0f} times gym-sokoban at its fastest, {slow:,.0f} times at its "
                "default"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each is measured")
    parser.add_argument(
        "--peers", type=Path, help="directory with further packages to compare with"
    )
    parser.add_argument("--data", type=Path, help="directory with real data (webshop/)")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    if args.peers:
        sys.path.append(str(args.peers))
    warnings.filterwarnings("ignore")
    results: dict[str, Rates | None] = {}
    print(
        f"python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'steps per second':46s} {'by the clock':>14s} {'of CPU time':>14s}")
    for name, measure in measures(args.data).items():
        try:
            results[name] = rates = measure(args.seconds)
        except ImportError as error:
            results[name] = None
            print(f"{name:46s} absent: {error}")
            continue
        print(f"{name:46s} {rates[0]:14,.0f} {rates[1]:14,.0f}")
    compare(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
