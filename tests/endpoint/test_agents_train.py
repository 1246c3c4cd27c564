"""Agents of well-known frameworks train a small model for some steps. Every token that is trained
was sampled, as the engine itself tells, and the stored episodes replay."""

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_agents import OPENAI_NODE, lite_agent, react_agent, sdk_agent, smol_agent

import turnwise
from turnwise.evaluate.replay import replay_episodes
from turnwise.generate.base import Sampling, Session
from turnwise.generate.hf import HFGenerator
from turnwise.log.store import RunReader
from turnwise.types import Completion

pytestmark = pytest.mark.slow

SETTINGS = {
    "model": {
        "embedded": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "warmstart_episodes": 24,
            "warmstart_epochs": 4,
        }
    },
    "rollout": {
        "train": {"env_groups": 2, "group_size": 4},
        "max_response_tokens": 48,
        "max_context": 8192,
        "slots": 8,
        "step_timeout": 600,
        "reset_timeout": 600,
    },
    "algo": {"name": "grpo", "singleton": "zero"},
    "train": {"steps": 2, "max_turn": 4, "lr": 1e-3, "max_idle_steps": 100},
    "eval": {"before": False, "after": False, "baselines": False},
    "log": {"report": False},
}


class Engine(HFGenerator):
    """turnwise's own engine, which notes every completion by the episode that it is for."""

    said: ClassVar[defaultdict[str, set[tuple[int, ...]]]] = defaultdict(set)

    def __init__(self, model: Any, tokenizer: Any, config: Any) -> None:
        super().__init__(model, tokenizer, slots=config.slots, max_context=config.max_context)

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        completion = await super().generate(session, new_ids, sampling)
        self.said[session.key.partition("#")[0]].add(tuple(completion.ids))
        return completion


def train(env: str, folder: Path, *, slots: int) -> None:
    Engine.said.clear()
    run = turnwise.train(
        env=env,
        generator=Engine,
        config=SETTINGS,
        overrides={
            "log.dir": str(folder),
            "env.options.workers": 0,
            "env.options.slots": slots,
        },
        quiet=True,
    )
    reader = RunReader(run.path)
    assert [entry.broken for entry in reader.ledger()] == [0, 0]
    assert all(entry.trained > 0 for entry in reader.ledger())
    for step in reader.steps():
        episodes = reader.episodes(step)
        for episode in episodes:
            for turn in episode.turns:
                assert tuple(turn.completion.ids) in Engine.said[episode.id]
        played = next(episode for episode in episodes if not episode.status.failed)
        assert replay_episodes([played], reader.config) == [None]


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("langgraph", react_agent),
        ("agents", sdk_agent(True)),
        ("litellm", lite_agent),
        ("smolagents", smol_agent),
    ],
    ids=["langgraph", "agents", "litellm", "smolagents"],
)
def test_frameworks_train_unmodified(module: str, program: Any, tmp_path: Path) -> None:
    pytest.importorskip(module)
    # Threads of one process: the frameworks are imported once. Some of them share state.
    train(turnwise.agent(program), tmp_path, slots=1)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_a_node_program_trains(tmp_path: Path) -> None:
    (tmp_path / "agent.mjs").write_text(OPENAI_NODE)
    subprocess.run(["npm", "install", "--silent", "openai"], cwd=tmp_path, check=True)
    train(f"command:cd {tmp_path} && node agent.mjs", tmp_path / "runs", slots=4)
