"""Less of what blocks of the documentation do: this file is the programs `turnwise` and `python` of
a block that is marked small, and `shrink` is for its Python.

A run has a step of two groups of two episodes, a warm start of 16 episodes, and imitates 4. A
server is stopped as soon as it says where it serves; one that a command asks at localhost:8000 is
started for it, and so is a Ray cluster. `watch --stay` has a terminal, where q is typed. `doctor`
may find a run this small ill. The hub's models are those of the folder `hub`. The programs that
install are in doc_install.py.
"""

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

REAL = "TURNWISE_DOC_REAL"
SKIPPED = 77
"""The status of a command that needs what is not on this machine; its last line says what."""
STEPS = 12
"""Steps of the runs that are there."""
ELSEWHERE = "http://localhost:8000"
"""Where pages ask a server of the reader's."""
PLACES = {"--nodes": "2", "--gpus": "1"}
"""What there is of a cluster."""
CLUSTER = "head:6379"
VERL = {"verl", "backend=verl"}
ON_VERL = ("train.mini_batches=1", "train.device=cpu")
"""verl splits whole groups. The nodes' GPUs are only said to be there."""
HUB = "model.path=OWNER/NAME"
GGUF = "DIR/FILE.gguf"
DRAWN = b"\x1b[?2026l"
"""Ends a drawn view."""
SERVERS = ("serve", "serve-env", "inspect")
IMITATION = ("sft.episodes=4", "sft.epochs=1", "eval.episodes=2")
RUN = (
    *("rollout.train.env_groups=2", "rollout.train.group_size=2", "eval.baselines=false"),
    *("train.steps=1", *IMITATION),
)
EMBEDDED = ("model.embedded.warmstart_episodes=16",)
GIVEN = ("train.compile=false", "rollout.max_response_tokens=16")
TRAINERS = ("turnwise.trainers.ppo_multi_turn", "examples/run_multi_turn_ppo.py")
"""A module and a script that take the words of `turnwise train`."""
OVERRIDES = "turnwise.integrations.verl.overrides"
LESS = {
    "scripts/break_invariants.py": ("streams-collide", "end-token-untrained"),
    "benchmarks/penalty_groups.py": ("--steps", "1", "--arms", "both"),
    "benchmarks/verl_cluster.py": (
        *("--workers", "1", "2", "--groups", "4"),
        *("--env-seconds", "0.1", "--reply-seconds", "0.1"),
    ),
}
"""Arguments for scripts."""
SAID = {
    "scripts/trl_own_tests.py": "VerifiersGRPOTrainer: 1 passed\n",
    "scripts/verifiers_table.py": "2 of the 2 that can run here run",
}
"""What these scripts say of a success. Their status is 0 after a failure too."""


def smaller(words: list[str]) -> list[str]:
    """The command with less to do.

    Example:
        >>> smaller(["doctor", "runs/NAME"])
        ['doctor', 'runs/NAME']
        >>> smaller(["train", "--resume", "runs/NAME"])
        ['train', '--resume', 'runs/NAME', 'train.steps=13']
    """
    given = any(word.startswith("model.path=") for word in words)
    embedded = GIVEN if given else EMBEDDED
    stored = any(word.startswith("runs/") for word in words)  # with the model of that run
    for name, number in PLACES.items():
        if name in words:
            words[words.index(name) + 1] = number
    match words[0]:
        case "train" | "sft" if "--dry-run" in words:
            return words
        case "train" if "--resume" in words:
            return [*words, f"train.steps={2 if VERL & set(words) else STEPS + 1}"]
        case "train" | "sweep" | "serve-policy":
            there = ON_VERL if VERL & set(words) else ()
            return [*words, *RUN, *there, *embedded]
        case "sft" if "--resume" not in words:
            return [*words, *IMITATION, *(() if stored or "--write" in words else embedded)]
        case "rollout":
            return [*words, *RUN[:2]]
        case "eval":
            return [*words, "--episodes", "2"]
        case command if command in SERVERS and "--export" not in words:
            return [*words, "--port", "0"]
        case _:
            return words


def main(program: str, *words: str) -> int:
    if program == "python":
        return _saying(_python(words), SAID.get(words[0], ""))
    return _turnwise(smaller(list(words)))


def _python(words: tuple[str, ...]) -> list[str]:
    """The command, with less to do where it is known what it does."""
    if set(TRAINERS) & set(words[:2]):
        ask = [sys.executable, "-S", "-E", str(Path(__file__).parents[1] / "warm.py"), "ask"]
        return [*ask, *words, *smaller(["train"])[1:]]
    if OVERRIDES in words:
        words = (*words[:2], *smaller(["train", *words[2:], "backend=verl"])[1:])
    if not shutil.which("nvidia-smi"):
        os.environ["VERL_PLATFORM"] = "cpu"
    return [sys.executable, *words, *LESS.get(words[0], ())]


def _saying(command: list[str], text: str) -> int:
    """The status of a command, not 0 where it does not say the text."""
    if not text:
        return subprocess.run(command).returncode
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    return done.returncode or int(text not in done.stdout)


def _turnwise(words: list[str]) -> int:
    command = [os.environ[REAL], *words]
    if lacking := _lacking(" ".join(words)):
        print(f"{lacking} is not installed")
        return SKIPPED
    if HUB in words:  # a real start: a process that has imported the library keeps its cache
        os.environ["HF_HUB_CACHE"] = str(Path("hub").resolve())
        command[:1] = [sys.executable, "-m", "turnwise"]
    if any(ELSEWHERE in word for word in words):
        return _with_server(words)
    if CLUSTER in words:
        return _with_cluster(words)
    if words[0] == "doctor":
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="")
        return 0 if " checks, " in done.stdout else done.returncode
    if "--stay" in words:
        return _in_terminal(command)
    if words[0] not in SERVERS or "--export" in words:
        return subprocess.run(command).returncode
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        _address(server)
        server.send_signal(signal.SIGTERM)
        _address(server)
    return server.returncode


def _lacking(words: str) -> str | None:
    """What the command needs and is not there."""
    if "command:node" in words and shutil.which("node") is None:
        return "node"
    if "model.gguf_file=" in words and not Path(GGUF).is_file():
        return "the extra gguf"
    return None


def _address(server: subprocess.Popen[str]) -> str | None:
    """Where it serves, once it says so. Passes on what it says."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if found := re.search(r"https?://[^/\s]+", line):
            return found[0]
    return None


def _with_server(words: list[str]) -> int:
    """The status of the command, with the policy of a run in place of the reader's own server."""
    serve = [os.environ[REAL], "serve", "runs/NAME", "--port", "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        address = _address(server)
        assert address is not None
        there = [word.replace(ELSEWHERE, address) for word in words]
        try:
            return subprocess.run([os.environ[REAL], *there]).returncode
        finally:
            server.send_signal(signal.SIGTERM)


def _with_cluster(words: list[str]) -> int:
    """The status of the command, with two Ray nodes on this machine in place of the reader's."""
    program = Path(__file__).parents[1] / "integrations/verl_cluster.py"
    nodes = subprocess.Popen(
        [sys.executable, str(program), "1"],
        stdin=subprocess.PIPE,  # they end when it closes
        stdout=subprocess.PIPE,
        text=True,
    )
    assert nodes.stdout is not None
    address = next(line for line in nodes.stdout if line.startswith("ADDRESS ")).split()[1]
    there = [word.replace(CLUSTER, address) for word in words]
    try:
        return subprocess.run([os.environ[REAL], *there]).returncode
    finally:
        nodes.communicate()


def _in_terminal(command: list[str]) -> int:
    """The status of the command in a terminal of its own, where q is typed once it has drawn."""
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    handles = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    process = subprocess.Popen(command, env=environment, **handles)
    os.close(follower)
    seen = b""
    with suppress(OSError):  # the terminal is gone with its last user
        while part := os.read(leader, 65536):
            os.write(1, part)
            if DRAWN not in seen and DRAWN in (seen := seen + part):
                os.write(leader, b"q")
    assert DRAWN in seen
    return process.wait()


def shrink() -> None:
    """Makes every config of this process small, as the commands' are."""
    from turnwise.config import load

    parse, less = load.parse_overrides, smaller(["train"])[1:]

    def parse_smaller(words: Sequence[str]) -> dict[str, Any]:
        own = any(word.startswith("train.steps=0") for word in words)  # imitation alone
        return parse([*words, *(word for word in less if not (own and "train.steps" in word))])

    load.parse_overrides = parse_smaller


@cache
def program_folder() -> str:
    """A folder for the head of PATH, with the programs of this file."""
    import atexit

    import doc_install
    import warm

    os.environ[REAL] = str(Path(warm.programs()) / "turnwise")
    folder = tempfile.mkdtemp(prefix="turnwise-small-")
    atexit.register(shutil.rmtree, folder)
    quick = f'"{sys.executable}" -S -E "{__file__}"'
    install = f'"{sys.executable}" "{doc_install.__file__}"'
    starts = dict.fromkeys(("turnwise", "python"), quick)
    for name, start in {**starts, **dict.fromkeys(doc_install.PROGRAMS, install)}.items():
        program = Path(folder) / name
        program.write_text(f'#!/bin/sh\nexec {start} {name} "$@"\n')
        program.chmod(0o755)
    return folder


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
