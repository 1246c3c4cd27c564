"""`python -m turnwise.integrations.verl.overrides CONFIG`: the Hydra overrides that run a config of ours with verl's
own command. One per line, ready for `xargs`:

    export VERL_USE_EXTERNAL_MODULES=turnwise.integrations.verl.engines.plugin
    python -m turnwise.integrations.verl.overrides my.yaml --gpus 8 | xargs -d '\\n' python -m verl.trainer.main_ppo
"""

import sys
from collections.abc import Sequence

from turnwise.config.load import load_config
from turnwise.integrations.verl.config.resolve import check_envs, open_recorder, place_model
from turnwise.integrations.verl.config.sections import Payload
from turnwise.integrations.verl.config.settings import check_supported, engine_name, to_overrides, verl_settings
from turnwise.integrations.verl.faults.cluster import CPU_SLOTS, find_placement


def main(words: Sequence[str]) -> list[str]:
    """The overrides. `--nodes` and `--gpus` say where; every other word is a config, a recipe or an override of ours.

    The run directory is made here, as log.dir and log.name say, with the resolved config in it and the embedded model
    where none is given; verl's command fills it.
    """
    given, rest = _placement_words(words)
    sources = [word for word in rest if "=" not in word]
    if len(sources) > 1:
        raise SystemExit(f"one config or recipe is taken, got {', '.join(sources)}; overrides are key=value")
    ours = [word for word in rest if "=" in word]
    config = load_config(sources[0] if sources else "default", [*ours, "backend=verl"])
    config, _ = check_envs(config, Payload())
    placement = find_placement(device=config.train.device, nodes=given.get("nodes", 1), gpus=given.get("gpus"))
    check_supported(config, engine=engine_name(config, device=placement.device))
    recorder = open_recorder(config)
    assert recorder.path is not None
    folder = recorder.path.resolve()
    try:
        model_path, tokenizer_path = place_model(config, folder)
        settings = verl_settings(
            config, placement=placement, model_path=model_path, tokenizer_path=tokenizer_path, run_dir=str(folder)
        )
    finally:
        recorder.close()
    settings |= {"turnwise.config": str(folder / "config.yaml"), "turnwise.run_dir": str(folder)}
    if placement.device == "cpu":  # a Ray of its own, with as many logical devices as there are ranks
        settings |= {
            "ray_kwargs.ray_init.address": "local",
            "ray_kwargs.ray_init.num_cpus": CPU_SLOTS,
            "ray_kwargs.ray_init.num_gpus": placement.ranks,
        }
    return to_overrides(settings)


def _placement_words(words: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    found: dict[str, int] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in ("--nodes", "--gpus"):
            if not queue or not queue[0].isdigit():
                raise SystemExit(f"{word} needs a number")
            found[word.removeprefix("--")] = int(queue.pop(0))
        else:
            rest.append(word)
    return found, rest


if __name__ == "__main__":
    try:
        print("\n".join(main(sys.argv[1:])))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
