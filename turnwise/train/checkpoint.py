"""Checkpoints that are whole or absent: written beside, synced, checksummed, renamed.

    checkpoints/step_000050/
      model/               a Hugging Face directory: `from_pretrained` loads it
      trainer.safetensors  what else learns or moves: adapters, critic, optimizer moments, generator states
      state.json           counters, schedules, controllers, file positions
      manifest.json        sha256 of every other file; written last

Tensors are safetensors and everything else is JSON, so loading a stranger's checkpoint runs none of his code.
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
from typing import Any

from torch import Tensor

from turnwise.types import Json

FORMAT = "turnwise-checkpoint-1"
_NAME = re.compile(r"(?:step|\.replaced)_(\d{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. What was there before is untouched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was read back and found whole."""

    path: Path
    step: int
    """Training steps done."""
    state: Mapping[str, Json]

    @property
    def model(self) -> Path:
        """The Hugging Face directory."""
        return self.path / "model"

    def tensors(self) -> dict[str, Tensor]:
        """What trainer.safetensors holds, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.path / "trainer.safetensors")


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Json],
    save_model: Callable[[Path], None],
    keep: int,
) -> Path:
    """The path of the new checkpoint, once it is on the disk for certain. Older ones beyond `keep` go after that.

    Raises:
        CheckpointError: the disk is full or not writable. The checkpoints that were there are intact.
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
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            beside / "trainer.safetensors",
        )
        _write(beside / "state.json", {"format": FORMAT, "step": step, "state": state})
        files = sorted(path for path in beside.rglob("*") if path.is_file())
        sums = {path.relative_to(beside).as_posix(): _sha256(path) for path in files}
        _write(beside / "manifest.json", {"format": FORMAT, "step": step, "sha256": sums})
        for path in [*files, beside / "manifest.json", beside / "model", beside]:
            _sync(path)
        if final.exists():  # a run that was resumed before this step writes it again
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)  # a checkpoint still, until the new one stands in its place
        beside.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        # Whatever was written so far is not a checkpoint, and on a full disk its room is needed.
        with contextlib.suppress(OSError):
            shutil.rmtree(beside)
        number, said = (error.errno, error.strerror) if isinstance(error, OSError) else (_os_error(str(error)), None)
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "make the folder writable"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder} ({said or error}); the ones "
            f"before it are intact. To go on: {remedy}, then `turnwise train --resume {folder.parent}`"
        ) from error
    for old in folder.glob(".replaced_*"):
        shutil.rmtree(old)
    # Those of later steps are torn, or this run would have begun after them.
    for old in [path for path in list_checkpoints(folder) if _step_of(path) <= step][:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first. They are not read."""
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))
    found = {_step_of(folder / name): folder / name for name in names}  # a replaced one counts where it has no heir
    return [path for _, path in sorted(found.items())]


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte checked against its manifest.

    Raises:
        CheckpointError: it is torn, edited, incomplete, or not turnwise's.
    """
    manifest = _read(path / "manifest.json", path)
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("sha256"), dict):
        raise CheckpointError(f"{path} is not a checkpoint of this format ({FORMAT}): {manifest.get('format')!r}")
    sums: dict[str, str] = manifest["sha256"]
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {"manifest.json"}
    if present != set(sums):
        odd = sorted(present ^ set(sums))
        raise CheckpointError(f"{path} does not hold the files of its manifest: {', '.join(odd[:5])}")
    for name, expected in sums.items():
        if _sha256(path / name) != expected:
            raise CheckpointError(f"{path / name} is torn or was edited: its sha256 is not the manifest's")
    state = _read(path / "state.json", path)
    if state.get("step") != manifest.get("step") or not isinstance(state.get("state"), dict):
        raise CheckpointError(f"{path}: state.json and manifest.json speak of different steps")
    return Checkpoint(path=path, step=int(state["step"]), state=state["state"])


def latest_checkpoint(folder: Path, *, refused: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where there is none. `refused` hears of every one passed over.

    Raises:
        CheckpointError: there are some, and not one of them is whole.
    """
    found = list_checkpoints(folder)
    for number, path in reversed(list(enumerate(found))):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            if number == 0:
                raise CheckpointError(
                    f"{error}; no checkpoint in {folder} is whole, so the run cannot go on. To begin again and lose "
                    "what it recorded, remove that folder"
                ) from error
            refused(f"{error}; the checkpoint before it is used")
    return None


def _os_error(message: str) -> int | None:
    """The number of the system's error in what safetensors says of it."""
    found = re.search(r"os error (\d+)", message)
    return None if found is None else int(found[1])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, data: Mapping[str, Json]) -> None:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _read(path: Path, checkpoint: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {path.name} cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{checkpoint}: {path.name} is not a JSON object")
    return data


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
