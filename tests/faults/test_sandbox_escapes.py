"""The Python tool under `confinement: kernel` against every known way out, as root and not."""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sandbox_escapes import ESCAPES, WORKS_OUTSIDE, program

TOOLS = Path(__file__).parents[2] / "turnwise" / "envs" / "tools"
NOBODY = 65534
RUNNER = """
import json, os, sys
os.set_inheritable(os.open(sys.argv[2], os.O_RDWR), True)
sys.path.insert(0, sys.argv[1])
import python_tool
limits = python_tool.PythonLimits(seconds=300, output_chars=100_000, processes=200)
try:
    result = python_tool.run_python(sys.stdin.read(), limits=limits, confinement="kernel")
except python_tool.SandboxError as error:
    print(json.dumps({"refused": str(error)}))
else:
    print(json.dumps({"output": result.output, "holds": result.holds, "status": result.exit_code}))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


@dataclass(frozen=True, kw_only=True)
class User:
    """Who runs turnwise, and with which Python."""

    id: int
    python: str

    def run(self, *args: str, text: str = "") -> str:
        as_user: dict[str, Any] = {}
        if self.id != os.getuid():
            as_user = {"user": self.id, "group": self.id, "extra_groups": []}
        result = subprocess.run(
            [self.python, *args],
            input=text, capture_output=True, text=True, timeout=600, cwd="/", check=False, **as_user
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture(params=["root", "another user"])
def user(request: pytest.FixtureRequest) -> User:
    if request.param == "root":
        if os.getuid() != 0:
            pytest.skip("the tests do not run as root")
        return User(id=0, python=sys.executable)
    if os.getuid() != 0:
        return User(id=os.getuid(), python=sys.executable)
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        one = User(id=NOBODY, python=python)
        with contextlib.suppress(OSError, AssertionError):
            one.run("-c", "import sys; assert sys.version_info >= (3, 11)")
            return one
    pytest.skip("no Python 3.11 that a user without rights may start")


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What the test has prepared for code that gets out, and whether any did."""

    host: dict[str, object]
    sockets: list[socket.socket]
    fifos: list[int]
    folders: list[Path]

    def touched(self) -> list[str]:
        found: list[str] = []
        for one in self.sockets:
            with contextlib.suppress(BlockingIOError):
                one.accept() if one.type == socket.SOCK_STREAM else one.recv(9)
                found.append(f"{one!r} heard something")
        for fifo in self.fifos:
            with contextlib.suppress(BlockingIOError):
                found.append(f"a pipe holds {os.read(fifo, 9)!r}")
        for folder in self.folders:
            found += [path.name for path in folder.iterdir() if path.name in ("written", "renamed")]
        return found


@pytest.fixture
def outside(user: User) -> Iterator[Outside]:
    with contextlib.ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="escape-")))
            for place in (None, "/var/tmp")
        ]
        first, second = folders
        for folder in folders:
            folder.chmod(0o777)
        listen: list[socket.socket] = []

        def bound(address: Any, family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
            one = stack.enter_context(socket.socket(family, kind))
            one.bind(address)
            one.setblocking(False)
            if kind == socket.SOCK_STREAM:
                one.listen(64)
            if isinstance(address, str) and not address.startswith("\0"):
                os.chmod(address, 0o777)
            listen.append(one)
            return one

        unix, name = socket.AF_UNIX, f"\0turnwise-escape-{first.name}"
        bound(str(first / "stream"), unix)
        bound(str(first / "datagram"), unix, socket.SOCK_DGRAM)
        bound(str(second / "stream"), unix)
        bound(name, unix)
        bound(name + "-d", unix, socket.SOCK_DGRAM)
        tcp = bound(("127.0.0.1", 0), socket.AF_INET)
        udp = bound(("127.0.0.1", 0), socket.AF_INET, socket.SOCK_DGRAM)
        fifos: list[int] = []
        for folder in folders:
            os.mkfifo(folder / "fifo")
            os.chmod(folder / "fifo", 0o666)
            fifos.append(os.open(folder / "fifo", os.O_RDWR | os.O_NONBLOCK))
            stack.callback(os.close, fifos[-1])
        (first / "file").write_text("secret")
        (first / "file").chmod(0o666)
        _, shm = tempfile.mkstemp(dir="/dev/shm", prefix="escape-")
        stack.callback(os.unlink, shm)
        os.chmod(shm, 0o666)
        libc, key = ctypes.CDLL(None), 0x70000000 | os.getpid()
        segment = libc.shmget(key, 64, 0o1666)
        stack.callback(libc.shmctl, segment, 0, None)
        as_user = {} if user.id == os.getuid() else {"user": user.id, "group": user.id}
        victim = subprocess.Popen(["sleep", "3600"], env={"SECRET": "x"}, cwd="/", **as_user)  # pyright: ignore[reportCallIssue, reportArgumentType]
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        host: dict[str, object] = {
            "stream": str(first / "stream"), "datagram": str(first / "datagram"),
            "var stream": str(second / "stream"), "abstract": name,
            "abstract datagram": name + "-d",
            "tcp": tcp.getsockname()[1], "tcp6": tcp.getsockname()[1], "udp": udp.getsockname()[1],
            "fifo": str(first / "fifo"), "var fifo": str(second / "fifo"), "folder": str(first),
            "var folder": str(second), "file": str(first / "file"), "shm": shm, "sysv": key,
            "project": str(Path(__file__).resolve()), "pid": victim.pid,
        }  # fmt: skip
        yield Outside(host=host, sockets=listen, fifos=fifos, folders=folders)


def verdicts(output: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in output.splitlines() if "\t" in line)


def test_none_of_the_ways_out_is_open(user: User, outside: Outside) -> None:
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        os.chmod(folder, 0o755)
        for name in ("python_tool.py", "sandbox_child.py"):
            shutil.copy(TOOLS / name, folder)
        reply = json.loads(
            user.run("-c", RUNNER, folder, str(outside.host["file"]), text=program(outside.host))
        )
    if "refused" in reply:
        pytest.skip(f"this machine permits no namespaces: {reply['refused']}")
    found = verdicts(reply["output"])
    assert set(found) == set(ESCAPES), reply
    assert {name: what for name, what in found.items() if what == "ESCAPED"} == {}
    assert outside.touched() == []
    assert reply["holds"].startswith("The kernel confined the code")


@pytest.mark.parametrize("temporary", ["plain", "jörg's\\1 tab\there", "link"])
def test_python_stays_read_only_whatever_folders_are_called(
    temporary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists mounts by their resolved, escaped paths."""
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / temporary).mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / temporary))
    own = tmp_path / "jörg's\\1 tab\tPython"
    venv.create(own, symlinks=True)
    own.chmod(0o777)
    user = User(id=os.getuid(), python=str(own / "bin" / "python"))
    code = "import sys; print(sys.prefix); open(sys.prefix + '/written', 'w')"
    reply = json.loads(user.run("-c", RUNNER, str(TOOLS), os.devnull, text=code))
    if "refused" in reply:
        pytest.skip(f"this machine permits no namespaces: {reply['refused']}")
    assert not (own / "written").exists()
    assert reply["output"].startswith(f"{own}\n")
    assert "Read-only file system" in reply["output"]


def test_the_ways_are_ways(user: User, outside: Outside) -> None:
    """Without a sandbox they lead out, so that the test above can fail."""
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        os.chmod(folder, 0o777)
        code = f"import os; os.chdir({folder!r})\n{program(outside.host, WORKS_OUTSIDE)}"
        found = verdicts(user.run("-I", "-c", code))
    assert {name: what for name, what in found.items() if what != "ESCAPED"} == {}
    assert len(outside.touched()) >= 8


def test_there_are_enough_of_them() -> None:
    assert len(ESCAPES) >= 40
    assert set(WORKS_OUTSIDE) <= set(ESCAPES)
