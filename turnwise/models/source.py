"""Where a config's model is. Imports no libraries, so that a wrong path is told at once."""

import re
from difflib import get_close_matches
from pathlib import Path

from turnwise.config.schema import ModelConfig


def model_source(config: ModelConfig) -> str | None:
    """The config's model: a folder, or a name of the hub; None: the embedded one.

    Raises:
        ValueError: it is written as a path, and no model is there.
    """
    path = config.path
    if path is None:
        return None
    here = Path(path).expanduser()
    if here.is_dir():
        known = ("config.json", "adapter_config.json", config.gguf_file or "config.json")
        if not any((here / name).is_file() for name in known):
            raise ValueError(
                f"model.path: {path} has no config.json; give the folder that save_pretrained "
                "wrote (of a run, checkpoints/STEP/model)"
            )
        return path
    # The hub's names are NAME or OWNER/NAME; where OWNER is a folder here, a path was meant.
    named = re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+", path) and not path.startswith(".")
    near = get_close_matches(here.name, _folders(here.parent), n=1)
    local = here.parent.is_dir() if "/" in path else bool(near)
    if here.exists() or not named or local:
        what = "is no folder" if here.exists() else "does not exist"
        hint = f" (did you mean {here.parent / near[0]}?)" if near else ""
        raise ValueError(
            f"model.path: {path} {what}{hint}; give a folder with config.json, or OWNER/NAME of "
            "the Hugging Face hub"
        )
    return path


def _folders(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
