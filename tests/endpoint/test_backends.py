"""Programs in front of the engines of TRL and verl: the same endpoint, the same episodes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.config.schema import Config
from turnwise.log.store import RunReader
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

PROGRAM = """
import http.client
import json
from urllib.parse import urlsplit


def talk(task, base_url):
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    messages = [{"role": "user", "content": f"Task {task.seed}"}]
    for _ in range(2):
        body = json.dumps({"messages": messages})
        connection.request("POST", where.path + "/chat/completions", body)
        answer = json.loads(connection.getresponse().read())
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return sum(len(message["content"] or "") for message in messages) % 2
"""


def settings(folder: Path, backend: str, **changes: Any) -> Config:
    tiny_model("qwen2", hidden_size=64).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "talk.py").write_text(PROGRAM)
    return Config.model_validate(
        {
            "backend": backend,
            "model": {"path": str(folder / "model")},
            "env": {"name": f"agent:{folder / 'talk.py'}:talk", "options": {"workers": 1}},
            "rollout": {
                "train": {"env_groups": 2, "group_size": 2},
                "max_response_tokens": 8,
                "max_context": 768,
                "step_timeout": 300,
                "reset_timeout": 300,
            },
            "algo": {"name": "grpo"},
            "train": {"steps": 2, "max_turn": 3, "lr": 1e-3, "device": "cpu"},
            "eval": {"before": False, "after": False, "baselines": False},
            "log": {"dir": str(folder / "runs"), "name": "run", "report": False},
            **changes,
        }
    )


def check(run: RunReader) -> None:
    """Both requests of every program became turns of one conversation that is continued by ids."""
    for step in run.steps():
        episodes = run.episodes(step)
        assert len(episodes) == 4
        for episode in episodes:
            assert not episode.status.failed, episode.error
            assert [turn.restart for turn in episode.turns] == [True, False]
            assert all(turn.completion.ids for turn in episode.turns)
    assert [entry.broken for entry in run.ledger()] == [0, 0]


def test_a_program_trains_on_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from turnwise.integrations.trl.run import train

    check(RunReader(train(settings(tmp_path, "trl"), sinks=[]).path))


@pytest.mark.slow
@pytest.mark.verl
def test_a_program_trains_on_verl(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    sys.path.append(str(Path(__file__).parents[1] / "integrations"))
    from verl_parts import trained

    run, _ = trained(tmp_path, settings(tmp_path, "verl"))
    check(run)
