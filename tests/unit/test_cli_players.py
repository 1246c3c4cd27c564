"""eval, rollout, replay and play as a user runs them: real processes, real files."""

import json
import os
import pty
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import warm


def turnwise(*words: str, cwd: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [*warm.turnwise(), *words]
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, text=True)


WALKER = """
import re

def walk(situation):
    text = situation.messages[-1].content
    place, target = map(int, re.findall(r"You are at (\\d+), the target is at (\\d+)", text)[0])
    move = "right" if target > place else "left"
    moves = " || ".join([move] * min(5, abs(target - place)))
    return f"<think></think><answer>{moves}</answer>"
"""


def test_eval_against_another_player(tmp_path: Path) -> None:
    (tmp_path / "walker.py").write_text(WALKER)
    words = [
        "eval",
        "--env",
        "simple_game",
        "--player",
        "script:walker.py:walk",
        "--against",
        "random",
    ]
    done = turnwise(*words, "--episodes", "30", "--json", "--out", "won.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["result"]["success"]["estimate"] == 1.0
    assert data["comparison"]["only_b"] == 0
    assert data["comparison"]["more_tasks"] == 0
    assert data["comparison"]["verdict"].startswith("script:walker.py:walk is better than random")
    assert turnwise("replay", "won.jsonl", cwd=tmp_path).returncode == 0


def test_eval_of_prompts_plays_the_prompts(tmp_path: Path) -> None:
    """A config that trains on prompts is evaluated on them, not on the environment that it never
    plays."""
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pays.py").write_text(
        "def pays(prompt, completion, answer, **row): return float(completion == answer)\n"
        "def echo(situation): return situation.messages[-1].content[4:-1]\n"
    )
    settings = ["train.multi_turn=false", "data.prompts=rows.jsonl", "data.reward=pays.py:pays"]
    words = [
        "eval",
        "frozen_lake",
        *settings,
        "--player",
        "script:pays.py:echo",
        "--episodes",
        "6",
        "--json",
    ]
    done = turnwise(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["reward"]["estimate"] == 1.0
    words = [
        "rollout",
        "frozen_lake",
        *settings,
        "--player",
        "script:pays.py:echo",
        "--episodes",
        "6",
    ]
    assert turnwise(*words, cwd=tmp_path).returncode == 0
    stored = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert {row["tag"] for row in stored} == {"prompts"}


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_an_environment_that_does_not_exist_is_one_line(command: str, tmp_path: Path) -> None:
    done = turnwise(command, "--env", "nosuch", "--player", "random", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no environment is called 'nosuch'")
    assert "Traceback" not in done.stderr


class Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible server whose model always goes right; it remembers what it was asked."""

    asked: ClassVar[list[dict[str, object]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        reply = {"role": "assistant", "content": "<think></think><answer>right</answer>"}
        data = json.dumps({"choices": [{"message": reply, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_model_behind_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        player = f"openai:http://127.0.0.1:{server.server_address[1]}/v1#tiny"
        words = [
            "eval",
            "--env",
            "simple_game",
            "--player",
            player,
            "--episodes",
            "6",
            "--json",
            "--out",
            "o.jsonl",
        ]
        done = turnwise(*words, "rollout.max_response_tokens=33", cwd=tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["result"]
    assert result["player"] == "tiny"
    assert 0 < result["success"]["estimate"] < 1
    asked = Endpoint.asked[0]
    assert (asked["path"], asked["model"], asked["max_tokens"]) == (
        "/v1/chat/completions",
        "tiny",
        33,
    )
    assert asked["key"] == "Bearer not-a-real-key"
    assert turnwise("replay", "o.jsonl", cwd=tmp_path).returncode == 0
    gone = turnwise(
        "eval", "--env", "simple_game", "--player", "openai:http://127.0.0.1:9/v1", cwd=tmp_path
    )
    assert gone.returncode == 2
    assert "URL#MODEL" in gone.stderr


def test_rollout_then_replay_then_the_first_difference(tmp_path: Path) -> None:
    words = [
        "rollout",
        "--env",
        "frozen_lake",
        "--player",
        "random",
        "--episodes",
        "4",
        "--split",
        "val",
    ]
    done = turnwise(*words, "--out", "out/lake.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 episodes in out/lake.jsonl" in done.stdout
    path = tmp_path / "out" / "lake.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4
    assert {row["task"]["split"] for row in rows} == {"val"}
    done = turnwise("replay", str(path), "--show", cwd=tmp_path)
    assert done.returncode == 0
    assert "4 of 4 episodes gave the same result" in done.stdout
    rows[2]["turns"][0]["messages"][0]["content"] += " (a lie)"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = turnwise("replay", str(path), cwd=tmp_path)
    assert done.returncode == 1
    assert f"DIFFERENT  {rows[2]['id']}, turn 0: messages was" in done.stdout
    assert turnwise("replay", str(path), "--episode", rows[0]["id"], cwd=tmp_path).returncode == 0
    missing = turnwise("replay", str(path), "--episode", "nobody", cwd=tmp_path)
    assert missing.returncode == 2
    assert rows[0]["id"] in missing.stderr


def test_replay_without_a_config_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    done = turnwise("replay", "x.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "--config" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "--player", "nobody", "bandit"], "unknown player 'nobody'; players are random"),
        (["eval", "--split", "test", "bandit"], "val or train"),
        (["rollout", "--player", "script:none.py:f", "bandit"], "no file none.py"),
        (["play"], "name an environment"),
        (["play", "frozen_lakes"], "did you mean frozen_lake"),
        (["doctor"], "a run directory, or --machine"),
        (["doctor", "."], "not a run directory"),
    ],
)
def test_mistakes_are_answered_without_a_traceback(
    words: list[str], message: str, tmp_path: Path
) -> None:
    done = turnwise(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_play_with_lines(tmp_path: Path) -> None:
    words = ["play", "simple_game", "--env.options.size", "4", "--seed", "0"]
    done = turnwise(*words, cwd=tmp_path, given="fly\n" + "left\n0\nleft\n" + "right\n1\n" * 3)
    assert done.returncode == 0, done.stderr
    assert "0 left, 1 right>" in done.stdout
    assert "No legal action" in done.stdout
    assert "You won." in done.stdout
    assert "quit after 0 turns" in turnwise(*words, cwd=tmp_path, given="").stdout


def test_play_draws_what_the_observation_does_not_show(tmp_path: Path) -> None:
    (tmp_path / "hall.py").write_text(
        "from turnwise import BaseEnv\n\nclass Hall(BaseEnv):\n    actions = ('on', 'off')\n"
        "    def reset(self, seed=None):\n        self.at = 0\n        return self.seen()\n"
        "    def step(self, action):\n        self.at += 1\n"
        "        return self.seen(), 0.0, self.at == 3, {}\n"
        "    def seen(self):\n        return self.render() if self.at == 1 else 'A hall.'\n"
        "    def render(self):\n        if self.at == 2:\n            raise KeyError('lamp')\n"
        "        return '_ ' * self.at + 'P ' + '_ ' * (3 - self.at)\n"
    )
    done = turnwise("play", "hall.py:Hall", cwd=tmp_path, given="on\non\non\n")
    assert done.returncode == 0, done.stderr
    shown = [line.strip() for line in done.stdout.splitlines()]
    assert shown.count("P _ _ _") == 1, "drawn, as the opening does not show it"
    assert shown.count("_ P _ _") == 1, "not drawn twice"
    assert "(render failed: " in done.stdout
    assert "KeyError: 'lamp' (hall.py, line 15)" in done.stdout


def test_play_with_arrow_keys_in_a_terminal(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*warm.turnwise(), "play", "simple_game"],
        cwd=tmp_path, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(follower)
    assert process.stdout is not None
    seen = b""
    try:
        for number, keys in enumerate(
            (b"\x1b[D", b"\x1b[A\x1b[C", b"q"), start=1
        ):  # up is no action here
            while seen.count(b"quits) ") < number and (
                part := os.read(process.stdout.fileno(), 4096)
            ):
                seen += part
            os.write(leader, keys)
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
        os.close(leader)
    text = (seen + output).decode()
    assert process.returncode == 0, text
    assert "arrow keys (q quits) left" in text
    assert "quit after 2 turns" in text


def test_doctor_machine(tmp_path: Path) -> None:
    done = turnwise("doctor", "--machine", cwd=tmp_path)
    assert done.returncode == 0
    assert "cores usable" in done.stdout


def test_the_commands_import_no_torch() -> None:
    code = (
        "import sys; from turnwise.cli.main import available, build_app; build_app(available());"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
