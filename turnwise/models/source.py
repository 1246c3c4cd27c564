"""Where a config's model is. Imports no libraries, so that a wrong path is told at once."""

import os
import re
import ssl
import urllib.error
import urllib.request
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from turnwise.config.schema import ModelConfig

HUB_SECONDS = 5.0
"""How long the hub may take to answer at all."""
_FOLDERS = ("models", "runs", "checkpoints", "outputs", "data")
"""Folders of models: OWNER/NAME with one of them for OWNER is a path."""


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
    # The hub's names are NAME or OWNER/NAME; where OWNER is a folder here, or is called like one,
    # a path was meant.
    named = re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+", path) and not path.startswith(".")
    near = get_close_matches(here.name, _folders(here.parent), n=1)
    parent = here.parent.is_dir() or path.partition("/")[0] in _FOLDERS
    local = parent if "/" in path else bool(near)
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


@cache
def ask_hub(source: str) -> None:
    """Asks once whether the hub can give the model, as transformers would try for a minute. A
    folder, a model in the hub's cache and HF_HUB_OFFLINE need no hub.

    Raises:
        ValueError: the hub does not answer.
    """
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cached = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    stored = cached / f"models--{source.replace('/', '--')}"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline or stored.is_dir() or Path(source).expanduser().is_dir():
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(
            urllib.request.Request(hub, method="HEAD"), timeout=HUB_SECONDS
        ).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLError):
            return  # transformers may know its certificate
        raise ValueError(
            f"model.path: there is no folder {source} here, and the hub {hub} does not answer "
            f"({reason}); give a folder with config.json, or go online to download OWNER/NAME"
        ) from error
