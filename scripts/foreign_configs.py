"""Counts which config files of another project are read: scripts/foreign_configs.py KIND CHECKOUT.

KIND is ragen (config/**/*.yaml), verl-agent (scripts of examples/*_trainer and recipe that start a
training) or align-anything (PPO files). Prints a line per file: opened, with its environments, each
made and reset; read, where their data is not on this machine; or refused, with the reason of each
key.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from turnwise.algos.table import build_algorithm
from turnwise.config import Config, ConfigError, run_config
from turnwise.envs.base import EnvError
from turnwise.envs.registry import make_env
from turnwise.rollout.plan import env_configs
from turnwise.train.setup import choose_setting

KINDS = ("ragen", "verl-agent", "align-anything")


def files(kind: str, checkout: Path) -> Iterator[Path]:
    """The published files of a checkout, links that lead nowhere included."""
    if kind == "ragen":
        yield from sorted((checkout / "config").rglob("*.yaml"))
    elif kind == "align-anything":
        yield from sorted((checkout / "align_anything" / "configs" / "train").rglob("*ppo*.yaml"))
    else:
        found = [*checkout.glob("examples/*_trainer/*.sh"), *checkout.glob("recipe/*/*.sh")]
        for path in sorted(found):
            if re.search(r"python3? -m \S*main_(?!eval|generation)\w+", path.read_text()):
                yield path


def opened(config: Config) -> list[str]:
    """The environments of a run, each made and reset once."""
    if config.data.prompts is not None:
        choose_setting(config)
        return []
    names: list[str] = []
    for split, groups in (("train", config.rollout.train), ("val", config.rollout.val)):
        played = env_configs(config, groups) if groups.tags or not config.envs else config.envs
        for tag, settings in played.items():
            env = make_env(settings, max_turn=config.train.max_turn)
            try:
                env.reset(env.make_task(1, split), noise_seed=1)
            finally:
                env.close()
            names.append(f"{split} {tag} ({settings.name})")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("checkout", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = {"opened": 0, "read": 0, "refused": 0}
    for path in files(chosen.kind, chosen.checkout):
        verdict, lines = judge(path)
        counts[verdict] += 1
        print(f"{verdict:8} {path.relative_to(chosen.checkout)}")
        for line in lines:
            print(f"           {line}")
    total = sum(counts.values())
    print(f"{total} files: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    sys.exit(0 if total else 2)


def judge(path: Path) -> tuple[str, list[str]]:
    """(opened, read or refused, the environments or the reasons)."""
    try:
        config = run_config(path)
        build_algorithm(config.algo)
    except ConfigError as error:
        return "refused", list(error.problems)
    except ValueError as error:
        return "refused", [str(error)]
    data = [name for name in (config.data.prompts, config.data.val_prompts) if name]
    absent = [name for name in data if not Path(name).is_file()]
    if absent:
        return "read", [f"its data is not on this machine: {', '.join(absent)}"]
    try:
        return "opened", opened(config)
    except OSError as error:
        return "read", [f"its data is not on this machine: {error}"]
    except (EnvError, ValueError, ImportError) as error:
        return "refused", [str(error)]


if __name__ == "__main__":
    main()
