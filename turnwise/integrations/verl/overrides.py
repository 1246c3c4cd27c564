"""`python -m turnwise.integrations.verl.overrides CONFIG`: the Hydra overrides that run a config of
ours with verl's own command. One per line, ready for `xargs`:

    export VERL_USE_EXTERNAL_MODULES=turnwise.integrations.verl.engines.plugin
    python -m turnwise.integrations.verl.overrides my.yaml --gpus 8 |
        xargs -d '\\n' python -m verl.trainer.main_ppo

Without a GPU, export VERL_PLATFORM=cpu too.
"""

import sys
from collections.abc import Sequence
from typing import Any

from turnwise.config.base import run_config
from turnwise.integrations.verl.config.compose import to_overrides
from turnwise.integrations.verl.config.keys import flat
from turnwise.integrations.verl.config.resolve import check_envs, open_recorder, place_model
from turnwise.integrations.verl.config.sections import Payload
from turnwise.integrations.verl.config.settings import (
    check_supported,
    engine_name,
    verl_settings,
)
from turnwise.integrations.verl.faults.cluster import (
    CPU_SLOTS,
    find_placement,
    worker_environment,
)


def main(words: Sequence[str]) -> list[str]:
    """The overrides. `--nodes`, `--gpus` and `--address` say where; every other word is a config, a
    recipe or an override of ours.

    The run directory is made here, as log.dir and log.name say, with the resolved config in it and
    the embedded model where none is given; verl's command fills it.
    """
    given, rest = _placement_words(words)
    sources = [word for word in rest if "=" not in word]
    if len(sources) > 1:
        raise SystemExit(
            f"one config or recipe is taken, got {', '.join(sources)}; overrides are key=value"
        )
    ours = [word for word in rest if "=" in word]
    config = run_config(sources[0] if sources else None, [*ours, "backend=verl"])
    config, _ = check_envs(config, Payload())
    placement = find_placement(device=config.train.device, **given)
    check_supported(config, engine=engine_name(config, device=placement.device))
    recorder = open_recorder(config)
    assert recorder.path is not None
    folder = recorder.path.resolve()
    try:
        model_path, tokenizer_path = place_model(config, folder)
        settings = verl_settings(
            config,
            placement=placement,
            model_path=model_path,
            tokenizer_path=tokenizer_path,
            run_dir=str(folder),
        )
    finally:
        recorder.close()
    settings |= {"turnwise.config": str(folder / "config.yaml"), "turnwise.run_dir": str(folder)}
    ray_init = "ray_kwargs.ray_init"
    environment = worker_environment(device=placement.device)
    settings |= {
        f"{ray_init}.runtime_env.env_vars.{name}": value for name, value in environment.items()
    }
    if given.get("address") is not None:
        settings[f"{ray_init}.address"] = given["address"]
    elif placement.device == "cpu":  # a Ray of its own, with a logical device for each rank
        settings |= {
            f"{ray_init}.address": "local",
            f"{ray_init}.num_cpus": CPU_SLOTS,
            f"{ray_init}.num_gpus": placement.ranks,
        }
    return to_overrides(settings | flat(config.verl))


def _placement_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in ("--nodes", "--gpus"):
            if not queue or not queue[0].isdigit():
                raise SystemExit(f"{word} needs a number")
            found[word.removeprefix("--")] = int(queue.pop(0))
        elif word == "--address":
            if not queue:
                raise SystemExit("--address needs host:port, or auto")
            found["address"] = queue.pop(0)
        else:
            rest.append(word)
    return found, rest


if __name__ == "__main__":
    try:
        print("\n".join(main(sys.argv[1:])))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
