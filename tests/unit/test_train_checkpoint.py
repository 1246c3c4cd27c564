"""Checkpoints: whole or absent, and the one before is always there."""

import errno
import json
from pathlib import Path

import pytest
import torch

from turnwise.train.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)


def write(folder: Path, step: int, *, keep: int = 2, save_model=None) -> Path:
    def save(path: Path) -> None:
        (path / "config.json").write_text("{}")

    return write_checkpoint(
        folder,
        step=step,
        tensors={"weight": torch.full((3,), float(step))},
        state={"version": step},
        save_model=save_model or save,
        keep=keep,
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, 7)
    found = latest_checkpoint(tmp_path, refused=pytest.fail)
    assert found is not None
    assert (found.step, found.state["version"]) == (7, 7)
    assert found.tensors()["weight"].tolist() == [7.0, 7.0, 7.0]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        write(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_000011"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("trainer.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("trainer.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")),
        ("state.json", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.write_text(path.read_text()[:20])),
        ("manifest.json", lambda path: path.write_text(json.dumps({"format": "someone-elses"}))),
        ("manifest.json", lambda path: path.write_text("[]")),
        ("extra.bin", lambda path: path.write_bytes(b"?")),
    ],
)
def test_a_torn_or_foreign_one_is_refused_and_the_one_before_used(
    tmp_path: Path, name: str, damage
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2) / name)
    said: list[str] = []
    found = latest_checkpoint(tmp_path, refused=said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert "step_000002" in said[0]


def test_a_full_disk_leaves_the_one_before_intact(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(path: Path) -> None:
        (path / "half").write_bytes(b"0" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="free some space") as caught:
        write(tmp_path, 2, save_model=full)
    assert "No space left on device" in str(caught.value)
    assert read_checkpoint(tmp_path / "step_000001").step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"], (
        "nothing half-written stays"
    )


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".writing_000002" / "model").mkdir(parents=True)
    assert latest_checkpoint(tmp_path, refused=pytest.fail).step == 1
    write(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere", refused=pytest.fail) is None


def test_a_torn_one_of_a_later_step_costs_no_other(tmp_path: Path) -> None:
    """Resumed from before a torn checkpoint, with one to be kept: it is not the torn one."""
    (write(tmp_path, 100, keep=1) / "manifest.json").unlink()
    for step in (50, 60):
        assert read_checkpoint(write(tmp_path, step, keep=1)).step == step
    assert latest_checkpoint(tmp_path, refused=lambda message: None).step == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000060", "step_000100"]


def test_killed_while_one_takes_anothers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed writes its last step again; a kill in between leaves the old one."""
    write(tmp_path, 1, keep=1)
    rename, renamed = Path.rename, []

    def once(path: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1, keep=1)
    monkeypatch.undo()
    assert not (tmp_path / "step_000001").exists()
    found = latest_checkpoint(tmp_path, refused=pytest.fail)
    assert (found.step, found.tensors()["weight"].tolist()) == (1, [1.0, 1.0, 1.0])
    write(tmp_path, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"], (
        "nothing is left lying about"
    )


def test_where_none_is_whole_nothing_is_begun_anew(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "manifest.json").unlink()
    said: list[str] = []
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is whole, so the run cannot go on"
    ):
        latest_checkpoint(tmp_path, refused=said.append)
    assert len(said) == 1


def test_a_disk_that_is_full_for_safetensors_is_full(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    write(tmp_path, 1)

    def full(path: Path) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    with pytest.raises(CheckpointError, match="free some space"):
        write(tmp_path, 2, save_model=full)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
