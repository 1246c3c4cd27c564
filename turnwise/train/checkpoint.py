# pyright: reportUnknownVariableType=false
"""Atomic checkpoints: written to a temporary folder, synced, checksummed, then renamed.

    checkpoints/step_000050/
      model/               a Hugging Face directory: `from_pretrained` loads it
      adapter/             with LoRA: the adapter alone, for `model.adapter`
      trainer.safetensors  adapters, critic, optimizer moments, generator states
      state.json           counters, schedules, controllers, file positions
      manifest.json        sha256 of every other file; written last

Tensors are safetensors and everything else is JSON, so loading an untrusted checkpoint runs no code
from it.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from turnwise.json_lines import FileError, read_json
from turnwise.types import Json

FORMAT = "turnwise-checkpoint-1"
_NAME = re.compile(r"(?:step|\.replaced)_(\d{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. Earlier checkpoints are untouched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    step: int
    """Training steps done."""
    state: Mapping[str, Json]

    @property
    def model(self) -> Path:
        """The Hugging Face directory."""
        return self.path / "model"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of trainer.safetensors, on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / "trainer.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Json],
    save_model: Callable[[Path], None],
    keep: int,
    save_adapter: Callable[[Path], None] | None = None,
) -> Path:
    """The path of the new checkpoint, after it was synced to disk. Then deletes the oldest ones
    beyond `keep`.

    Raises:
        CheckpointError: the disk is full or not writable. The checkpoints that were there are
            intact.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = folder / f"step_{step:06d}"
    beside = folder / f".writing_{step:06d}"
    replaced = folder / f".replaced_{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing_*"):
            shutil.rmtree(leftover)
        (beside / "model").mkdir(parents=True)
        save_model(beside / "model")
        if save_adapter is not None:
            save_adapter(beside / "adapter")
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            beside / "trainer.safetensors",
        )
        _write(beside / "state.json", {"format": FORMAT, "step": step, "state": state})
        _seal(beside, {"format": FORMAT, "step": step})
        if final.exists():  # a run that was resumed before this step writes it again
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)  # remains a valid checkpoint until the new one is in place
        beside.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        # The partial files are not a checkpoint, and a full disk needs their space.
        with contextlib.suppress(OSError):
            shutil.rmtree(beside)
        number, said = (
            (error.errno, error.strerror)
            if isinstance(error, OSError)
            else (_os_error(str(error)), None)
        )
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "make the folder writable"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder} ({said or error}); "
            "the ones "
            f"before it are intact. To go on: {remedy}, then `turnwise train --resume "
            f"{folder.parent}`"
        ) from error
    for old in folder.glob(".replaced_*"):
        shutil.rmtree(old)
    # Checkpoints of later steps are incomplete; otherwise the run would have resumed from them.
    for old in [path for path in list_checkpoints(folder) if checkpoint_step(path) <= step][:-keep]:
        shutil.rmtree(old)
    return final


def write_folder(path: Path, save: Callable[[Path], None]) -> None:
    """Writes a model's folder beside, seals it with a manifest of checksums, and puts it in its
    place."""
    beside = path.with_name(f".writing_{path.name}")
    shutil.rmtree(beside, ignore_errors=True)
    save(beside)
    _seal(beside, {"format": FORMAT})
    if path.exists():
        shutil.rmtree(path)
    beside.rename(path)
    _sync(path.parent)


def check_files(path: Path) -> Path:
    """The path of a folder that `write_folder` wrote, once every byte agrees with its manifest.

    Raises:
        CheckpointError: it is torn, edited or incomplete.
    """
    try:
        _checked_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; where {path} is removed, a resumed run makes it again from its config"
        ) from error
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first. They are not read."""
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))
    # A replaced one counts if its replacement is missing.
    found = {checkpoint_step(folder / name): folder / name for name in names}
    return [path for _, path in sorted(found.items())]


def checkpoint_step(path: Path) -> int:
    """Training steps done, by the name of a checkpoint's folder.

    Example:
        >>> checkpoint_step(Path("runs/a/checkpoints/step_000050"))
        50
    """
    return int(path.name.rpartition("_")[2])


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte checked against its manifest.

    Raises:
        CheckpointError: it is torn, edited, incomplete, or not turnwise's.
    """
    manifest = _checked_manifest(path)
    state = _read(path / "state.json", path)
    if type(state.get("step")) is not int or state["step"] < 0:
        raise CheckpointError(f"{path}: state.json has no step, got {state.get('step')!r:.80}")
    if state["step"] != manifest.get("step") or not isinstance(state.get("state"), dict):
        raise CheckpointError(f"{path}: state.json and manifest.json speak of different steps")
    return Checkpoint(path=path, step=state["step"], state=state["state"])


def latest_checkpoint(folder: Path, *, refused: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint, or None if there is none. Calls `refused` for every checkpoint
    that it skips.

    Raises:
        CheckpointError: there are checkpoints, and none of them is valid.
    """
    found = list_checkpoints(folder)
    for number, path in reversed(list(enumerate(found))):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            if number == 0:
                raise CheckpointError(
                    f"{error}; no checkpoint in {folder} is whole, so the run cannot go on. To "
                    "begin again and lose "
                    "what it recorded, remove that folder"
                ) from error
            refused(f"{error}; the checkpoint before it is used")
    return None


def _seal(folder: Path, facts: Mapping[str, Json]) -> None:
    """Writes the manifest of a folder, and all of it to the disk for certain."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
    _write(folder / "manifest.json", {**facts, "sha256": sums})
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in [*files, folder / "manifest.json", *folders, folder]:
        _sync(path)


def _checked_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder that agrees with it."""
    manifest = _read(path / "manifest.json", path)
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("sha256"), dict):
        raise CheckpointError(
            f"{path} is not a checkpoint of this format ({FORMAT}): {manifest.get('format')!r}"
        )
    sums: dict[str, str] = manifest["sha256"]
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {
        "manifest.json"
    }
    if present != set(sums):
        odd = sorted(present ^ set(sums))
        raise CheckpointError(
            f"{path} does not hold the files of its manifest: {', '.join(odd[:5])}"
        )
    for name, expected in sums.items():
        if _sha256(path / name) != expected:
            raise CheckpointError(
                f"{path / name} is torn or was edited: its sha256 is not the manifest's"
            )
    return manifest


def _os_error(message: str) -> int | None:
    """The errno in an error message of safetensors."""
    found = re.search(r"os error (\d+)", message)
    return None if found is None else int(found[1])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, data: Mapping[str, Json]) -> None:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _read(path: Path, checkpoint: Path) -> dict[str, Any]:
    try:
        data = read_json(path, lambda data: data)
    except FileError as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{checkpoint}: {path.name} is not a JSON object")
    return cast(dict[str, Any], data)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
