"""Repositories that blocks of the documentation are run in or clone: this one, and small ones in
place of TRL's and verifiers'."""

import shutil
import subprocess
from pathlib import Path

from doc_pages import ROOT

LINKED = (
    *("Makefile", "pyproject.toml", "README.md", "LICENSE", "conftest.py"),
    *("requirements", "turnwise", "tests"),
)
TRL_TEST = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def test_training(tmp_path):
    rows = load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train")
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
    )
    model = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
    lengths = lambda completions, **_: [float(len(text)) for text in completions]
    trainer = GRPOTrainer(model=model, reward_funcs=lengths, args=args, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 1
"""
OLD_PACKAGE = """
import verifiers as vf
from datasets import Dataset


def says_ok(completion, **_):
    return float("ok" in completion[-1]["content"])


def load_environment():
    rows = Dataset.from_dict({"question": ["Say ok."] * 4, "answer": ["ok"] * 4})
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[says_ok]))
"""
PACKAGE = """
import verifiers.v1 as vf

__all__ = ["AskTaskset"]


class AskTask(vf.Task):
    @vf.reward
    async def says_ok(self, trace: vf.Trace) -> float:
        return float("ok" in trace.last_reply)


class AskTaskset(vf.Taskset[AskTask]):
    def load(self):
        return [AskTask(vf.TaskData(prompt="Say ok."), self.config.task) for _ in range(4)]
"""


def this_repository(folder: Path) -> None:
    """Its files as links, and a place for what `make` installs."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()


def trl(folder: Path) -> None:
    """In place of TRL's: with a test of GRPOTrainer."""
    _commit(folder / "github/huggingface/trl", {"tests/test_grpo_trainer.py": TRL_TEST})


def verifiers(folder: Path) -> None:
    """In place of verifiers': with an environment, and in v0.2.0 one of the old kind. The table is
    written into a copy of its page."""
    checkout = folder / "verifiers"
    files = {"pyproject.toml": '[project]\nname = "ask"\n', "ask.py": OLD_PACKAGE}
    _commit(checkout, {f"environments/ask/{name}": text for name, text in files.items()})
    _git(checkout, "tag", "v0.2.0")
    _commit(checkout, {"environments/ask/ask.py": PACKAGE})
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs/verifiers.md", folder / "docs")


def _commit(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    author = ("-c", "user.name=turnwise", "-c", "user.email=turnwise@localhost")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "Files")):
        _git(folder, *words)


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
