"""A Python tool: runs the model's code in a process with limits on time, memory, processes, files
and output."""

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

logger = logging.getLogger(__name__)

MAX_CODE_CHARS = 100_000
_CHILD = Path(__file__).with_name("sandbox_child.py")
KERNEL = {
    "network": "namespace",
    "files": "own root",
    "sockets": "seccomp",
    "processes": "kernel",
    "kill": "namespace",
}
"""The report where the kernel enforces everything."""

_HOLDS = (
    "The kernel confined the code: no network, no sockets of other programs, no other processes, "
    "no "
    "files but Python, the system's programs and libraries (to read) and its working directory. A "
    "flaw of the kernel itself would still let it out."
)
_HOLDS_LITTLE = (
    "Only a hook inside Python confined the code, at least in part: it stops careless code. Code "
    "that sets out to break out can, with all rights of the user that runs turnwise. It can read "
    "every file that this user can."
)

Confinement = Literal["auto", "kernel", "python"]


class SandboxError(RuntimeError):
    """The code was not run, because it could not be confined as asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonLimits:
    """Limits of the code."""

    seconds: float = 5.0
    """Wall time, after which everything it started is killed."""
    memory_mb: int = 1024
    """Address space of each of its processes."""
    processes: int = 16
    """Processes and threads, itself included."""
    file_mb: int = 16
    """Files in its working directory, all together."""
    output_chars: int = 8000
    """Longer output is cut and the code is stopped."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "processes", "file_mb", "output_chars"):
            value: float = getattr(self, name)
            if not 0 < value < 1_000_000:
                raise ValueError(f"{name} is positive and below a million, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonResult:
    """The result of a run."""

    output: str
    """Output and error streams of the code."""
    exit_code: int
    timed_out: bool
    truncated: bool
    """It wrote more than the limit and was stopped."""
    confinement: Mapping[str, str]
    """Who enforced what: "network", "files", "sockets", "processes", "kill". Equal to KERNEL where
    the kernel did."""

    @property
    def holds(self) -> str:
        """The isolation that was in force, and its gaps, in a sentence or two."""
        return _HOLDS if dict(self.confinement) == KERNEL else _HOLDS_LITTLE

    def text(self) -> str:
        """The result as a model should read it."""
        lines = [self.output] if self.output else []
        if self.timed_out:
            lines.append("error: the time is over; the code was stopped")
        elif self.truncated:
            lines.append("error: too much output; the code was stopped")
        elif self.exit_code != 0:
            lines.append(f"error: the code ended with status {self.exit_code}")
        return "\n".join(lines) or "(no output)"


def run_python(
    code: str, *, limits: PythonLimits | None = None, confinement: Confinement = "auto"
) -> PythonResult:
    """The result of running code as a program, in an empty directory that is gone afterwards.

    On Linux, where namespaces are allowed, the kernel cuts it off from the network, from other
    programs' sockets and processes, and from all files but Python, the system's and those it makes;
    elsewhere an audit hook inside its interpreter does, which malicious code can get around.
    `confinement="kernel"` refuses to run without the former, "python" does not even try it. The
    result's `holds` says in words what it was.

    Example:
        >>> run_python("print(6 * 7)").output
        '42'
    """
    limits = limits or PythonLimits()
    if len(code) > MAX_CODE_CHARS or "\x00" in code:
        return PythonResult(
            output=f"error: code is at most {MAX_CODE_CHARS} characters without null characters",
            exit_code=1,
            timed_out=False,
            truncated=False,
            confinement={},
        )
    # Without links, as the kernel lists what is mounted below it.
    base = os.path.realpath(tempfile.mkdtemp(prefix="turnwise-python-"))
    try:
        os.chmod(base, 0o711)
        work, stash = os.path.join(base, "work"), os.path.join(base, "stash")
        os.mkdir(work)
        os.mkdir(stash)
        result = _run(code, limits, confinement, work=work, stash=stash)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if confinement == "auto" and result.confinement and dict(result.confinement) != KERNEL:
        _warn_once(result.holds)
    if confinement == "kernel" and dict(result.confinement) != KERNEL:
        weak = ", ".join(f"{name}: {result.confinement.get(name, 'unknown')}" for name in KERNEL)
        raise SandboxError(
            f"the kernel could not confine the code ({weak}); allow namespaces, or use "
            "confinement: auto"
        )
    return result


@cache
def _warn_once(what: str) -> None:
    logger.warning("the Python tool: %s", what)


def _run(
    code: str, limits: PythonLimits, confinement: Confinement, *, work: str, stash: str
) -> PythonResult:
    spec = {
        "namespaces": confinement != "python",
        "require": KERNEL if confinement == "kernel" else None,
        "parent": os.getpid(),
        "work": work,
        "stash": stash,
        "seconds": limits.seconds,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "file_mb": limits.file_mb,
    }
    report_read, report_write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD), json.dumps(spec), str(report_write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(report_write,),
            start_new_session=True,
            env=_environment(work),
        )
    except BaseException:
        os.close(report_read)
        raise
    finally:
        os.close(report_write)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died before reading; its status says so
            process.stdin.write(code.encode("utf-8", "backslashreplace"))
            process.stdin.close()
        output, timed_out, truncated = _collect(process, limits)
        report = _read_report(report_read)
    finally:
        os.close(report_read)
        _kill(process)
    text = output.decode("utf-8", "replace")[: limits.output_chars].rstrip("\n")
    return PythonResult(
        output=text,
        exit_code=process.returncode,
        timed_out=timed_out,
        truncated=truncated,
        confinement=report,
    )


def _environment(work: str) -> dict[str, str]:
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {
        "PATH": os.defpath,
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONIOENCODING": "utf-8",
        **threads,
    }


def _collect(process: "subprocess.Popen[bytes]", limits: PythonLimits) -> tuple[bytes, bool, bool]:
    """(output, timed out, truncated). Ends when the code ends, even if something it started still
    holds the pipe."""
    assert process.stdout is not None
    output = bytearray()
    deadline = time.monotonic() + limits.seconds + 0.5  # half a second to start
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(output), True, False
            if selector.select(min(left, 0.05)):
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                output += chunk
                if len(output) > 4 * limits.output_chars + 4096:
                    return bytes(output), False, True
                if not chunk:
                    break
            elif process.poll() is not None:
                break
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return bytes(output), True, False
    return (
        bytes(output),
        False,
        len(output.decode("utf-8", "replace").rstrip("\n")) > limits.output_chars,
    )


def _read_report(fd: int) -> dict[str, str]:
    os.set_blocking(fd, False)
    try:
        data = os.read(fd, 4096)
    except BlockingIOError:
        return {}
    return cast(dict[str, str], json.loads(data)) if data else {}


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group is gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def make_python_tool(
    *, limits: PythonLimits | None = None, confinement: Confinement = "auto"
) -> Callable[[str], str]:
    """A tool called `python` for ToolEnv, with these limits.

    Example:
        >>> python = make_python_tool(limits=PythonLimits(seconds=10))
        >>> python("print(sum(range(10)))")
        '45'
    """

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints. It has no network, and keeps nothing
        between calls.

        Args:
            code: the program
        """
        return run_python(code, limits=limits, confinement=confinement).text()

    return python
