"""`turnwise push RUN TO`: writes the trained model and a model card to a folder or a hub."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from turnwise.cli.args import fail, told_shortly


def register(app: typer.Typer) -> None:
    app.command("push", epilog="Example: turnwise push runs/NAME models/lake")(push)


def push(
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/NAME.", metavar="RUN")],
    to: Annotated[
        str,
        typer.Argument(
            help="A folder that does not exist yet, or hub:USER/MODEL on the Hugging Face hub.",
            metavar="TO",
        ),
    ],
    private: Annotated[bool, typer.Option(help="hub: a private repository.")] = False,
) -> None:
    """Write the last checkpoint's model and a model card with its results to a folder or a hub."""
    from turnwise.log.card import model_card
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader
    from turnwise.procs.progress import Progress

    with Progress("loading libraries"):
        from turnwise.train.checkpoint import CheckpointError, latest_checkpoint

    with told_shortly((RunDirectoryError, CheckpointError, OSError)):
        reader = RunReader(run)
        checkpoint = latest_checkpoint(run / "checkpoints", refused=print)
        if checkpoint is None:
            raise RunDirectoryError(f"{run} has no complete checkpoint to push; train it first")
        if checkpoint.step == 0:
            raise RunDirectoryError(
                f"the only checkpoint of {run} is from before training; resume it with `turnwise "
                f"train --resume {run}` first"
            )
        hub = to.removeprefix("hub:") if to.startswith("hub:") else None
        name = (hub or to).rstrip("/").rpartition("/")[2]
        card = model_card(reader, name=name)
        if hub is None:
            folder = Path(to)
            if folder.exists():
                fail(f"{folder} exists and is not overwritten; name a new folder")
            _write(checkpoint.model, reader.path, card, folder)
            print(f"step {checkpoint.step} with its card is in {folder}")
            return
        api = _hub()
        with tempfile.TemporaryDirectory(prefix="turnwise-push-") as scratch:
            folder = Path(scratch) / "model"
            _write(checkpoint.model, reader.path, card, folder)
            address = _upload(api, folder, hub, private=private)
        print(f"step {checkpoint.step} with its card is at {address}")


def _write(model: Path, run: Path, card: str, folder: Path) -> None:
    """Writes to a temporary folder and renames it, so that the folder is never incomplete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(model, beside)
    shutil.copy(run / "config.yaml", beside / "config.yaml")
    (beside / "README.md").write_text(card, encoding="utf-8")
    beside.rename(folder)


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        fail("hub: needs the package huggingface_hub; run: pip install huggingface_hub")
    return HfApi()


def _upload(api: Any, folder: Path, name: str, *, private: bool) -> str:
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="turnwise push")
    except Exception as error:  # from the hub's client: no token, no network, no write access
        fail(
            f"the hub refused {name}: {type(error).__name__}: {str(error).splitlines()[0]}; check "
            "the name, `hf auth login` and the network"
        )
    return str(url)
