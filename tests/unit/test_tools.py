"""Tools: a Python sandbox that hostile code does not leave, a calculator, a search, and time limits
that kill."""

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs.messages import ToolEnv
from turnwise.envs.tools import (
    Document,
    PythonLimits,
    PythonResult,
    SandboxError,
    calculator,
    load_documents,
    make_python_tool,
    make_search_tool,
    run_python,
    with_time_limit,
)
from turnwise.envs.tools.calculator import CalculatorError, calculate, format_number
from turnwise.envs.tools.python_tool import KERNEL, Confinement
from turnwise.envs.tools.worker import Worker, WorkerError

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="limits of processes are checked on Linux"
)


def run(code: str, confinement: Confinement = "auto", **limits: float) -> PythonResult:
    return run_python(
        code, limits=PythonLimits(**({"seconds": 20} | limits)), confinement=confinement
    )  # pyright: ignore[reportArgumentType]


def assert_gone(folder: str) -> None:
    """No process is left of a run in this working directory (its path is on the command line of all
    of them)."""
    assert "turnwise-python-" in folder

    def left() -> list[str]:
        found: list[str] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if folder.encode() in (entry / "cmdline").read_bytes():
                        found.append(entry.name)
        return found

    assert wait_for(lambda: not left()), left()


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    """Whether it came to be true: in a moment, or on a busy machine in a long one."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def run_killed(code: str, confinement: Confinement = "auto", *, seconds: float) -> PythonResult:
    """The result of code that must be killed, which prints its folder first. Where a busy machine
    did not come to that in time, it is given more."""
    code = f"import os; print(os.getcwd())\n{code}"
    limits = (seconds, 10 * seconds, 60 * seconds)
    results = (run(code, confinement, seconds=limit) for limit in limits)
    return next(result for result in results if result.output)


def test_code_runs_as_a_program() -> None:
    result = run(
        "import sys\nclass A: pass\nprint(A.__module__, 6 * 7)\nprint('oops', file=sys.stderr)"
    )
    assert (result.output, result.exit_code) == ("__main__ 42\noops", 0)
    failed = run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert failed.exit_code == 1
    assert failed.output.startswith("before\nTraceback")
    assert failed.output.endswith("ZeroDivisionError: division by zero")
    assert "sandbox_child" not in failed.output
    assert failed.text().endswith("error: the code ended with status 1")
    assert run("import sys; sys.exit(3)").exit_code == 3
    assert run("").text() == "(no output)"
    assert run("print(input())").output.endswith("EOFError: EOF when reading a line")
    assert "SyntaxError" in run("def").output


@linux
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9**9**9**9",
        "import time; time.sleep(600)",
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0: os.setsid(); "
        "time.sleep(600)\ntime.sleep(600)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
    ],
)
def test_code_that_never_ends_is_killed_whole(code: str) -> None:
    result = run_killed(code, seconds=1)
    assert result.timed_out or result.exit_code != 0
    assert "time is over" in result.text() or "error" in result.text()
    assert_gone(result.output.splitlines()[0])


@linux
@pytest.mark.parametrize("confinement", ["auto", "python"])
def test_a_fork_bomb_is_survived(confinement: Confinement) -> None:
    result = run_killed("while True: os.fork()", confinement, seconds=3)
    assert result.exit_code != 0
    assert (
        "Resource temporarily unavailable" in result.output
        or "not allowed" in result.output
        or result.timed_out
    )
    assert_gone(result.output.splitlines()[0])
    if dict(result.confinement) == KERNEL:
        counted = run(
            "import os, time\ncount = 0\ntry:\n    while True:\n        if os.fork() == 0: "
            "time.sleep(600)\n"
            "        count += 1\nexcept OSError:\n    print(count)",
            processes=8,
        )
        assert 0 < int(counted.output) < 8


def test_memory_and_output_are_bounded() -> None:
    assert "MemoryError" in run("x = 'a' * (8 << 30)", memory_mb=256).output
    result = run("while True: print('x' * 1000)", output_chars=500)
    assert result.truncated
    assert len(result.output) <= 500
    assert "too much output" in result.text()
    result = run("print('\\u20ac' * 400)", output_chars=500)
    assert (result.truncated, len(result.output)) == (False, 400)


@pytest.mark.parametrize("confinement", ["auto", "python"])
def test_files_are_written_in_the_working_directory_only(
    tmp_path: Path, confinement: Confinement
) -> None:
    os.chmod(tmp_path, 0o777)
    outside = tmp_path / "evil"
    code = f"""
import os
open("inside.txt", "w").write("ok")
print(open("inside.txt").read(), os.listdir("."))
for path in ({str(outside)!r}, "../evil", "/dev/shm/turnwise-evil", "../../turnwise-evil"):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        print("refused")
print(os.getcwd())
"""
    result = run(code, confinement)
    lines = result.output.splitlines()
    assert lines[0] == "ok ['inside.txt']"
    assert lines[1:5] == ["refused"] * 4
    assert not outside.exists()
    assert not Path(lines[5]).exists()
    assert not Path(lines[5]).parent.exists()


def test_a_full_disk_is_not_the_hosts() -> None:
    code = "f = open('big', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20))\nf.close()"
    result = run(code, file_mb=4)
    assert result.exit_code != 0
    assert "File too large" in result.output or "No space left" in result.output


@pytest.mark.parametrize("confinement", ["auto", "python"])
def test_there_is_no_network(confinement: Confinement) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), "
            "5)\nprint('connected')",
            confinement,
        )
    assert result.exit_code == 1
    assert "connected" not in result.output


def test_kernel_confinement_is_told_or_refused_before_anything_runs(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    result = run("print(1)")
    if dict(result.confinement) == KERNEL:
        assert run("print(1)", "kernel").output == "1"
    else:
        with pytest.raises(SandboxError, match="kernel"):
            run("print(1)", "kernel")
    assert run("print(1)", "python").confinement["network"] == "python"


def test_hostile_code_texts() -> None:
    assert run("x" * 10_000_000).exit_code == 1
    assert run("print(1)\x00").exit_code == 1
    assert run("print('\udc80')").exit_code in (0, 1)
    assert run("import os; os._exit(7)").exit_code == 7
    assert run("import os; os.close(1); os.close(2)").exit_code in (0, 1, 120)
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exit_code in (1, 137)
    nested = run("(" * 50_000)
    assert nested.exit_code != 0


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="seconds is positive"):
        PythonLimits(seconds=0)


def test_python_is_a_tool_of_tool_env() -> None:
    env = ToolEnv(tools=[make_python_tool(), calculator], dataset=[{"prompt": "go"}])
    assert [schema["function"]["name"] for schema in env.oai_tools] == ["python", "calculator"]
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool_call>'
    call += (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "9**9**9**9"}}</tool_call>'
    )
    replies = env.env_response([{"role": "assistant", "content": call}], {})[0]
    assert replies[0]["content"] == "1024"
    assert replies[1]["content"].startswith("error: an exponent")


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-2 ^ 2", "-4"),
        ("2 ^ -2", "0.25"),
        ("2 ** 3 ** 2", "512"),
        ("10 % 4", "2"),
        ("1,250 / 3", "416.666666667"),
        (".5 + 1.25", "1.75"),
        ("--3", "3"),
        ("1/3*3", "1"),
    ],
)
def test_calculator(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "9**9**9**9",
        "1/0",
        "0^-1",
        "2^0.5",
        "(1",
        "1)",
        "1 2",
        "__import__('os')",
        "\x00\x1b",
        "(" * 400 + "1" + ")" * 400,
        "1" * 10_000_000,
        "9" * 499,
        "-" * 499,
        "2^" * 200 + "2",
        "*".join(["9" * 90] * 5) + "^99",
    ],
)
def test_calculator_refuses_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    answer = calculator(expression)
    assert answer.startswith("error: ") or len(answer) < 600


@examples(60)
@given(a=st.integers(-999, 999), b=st.integers(-999, 999), c=st.integers(1, 999))
def test_calculator_agrees_with_fractions(a: int, b: int, c: int) -> None:
    assert calculate(f"({a} - {b}) / {c} * {a} + {b}") == Fraction(a - b, c) * a + b
    assert Fraction(format_number(Fraction(a, 64))) == Fraction(a, 64)
    with pytest.raises(CalculatorError):
        calculate(f"{a} / ({b} - {b})")


def test_search_finds_and_says_when_it_does_not(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "otters.md").write_text("Otters eat fish and swim well.")
    (tmp_path / "owls.txt").write_text("Owls fly at night. " * 100)
    (tmp_path / "skip.bin").write_text("fish fish fish")
    secret = tmp_path.parent / "secret.txt"
    secret.write_text("fish secret")
    (tmp_path / "link.txt").symlink_to(secret)
    search = make_search_tool(tmp_path, snippet_chars=20)
    assert search("who eats FISH?") == "[1] notes/otters.md\nOtters eat fish and"
    assert search("zebra") == "Nothing found."
    assert search("\x00" * 1000) == "Nothing found."
    assert search("fish " * 1_000_000).startswith("[1] notes/otters.md")
    assert "secret" not in search("secret")


def test_documents_are_checked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no documents"):
        load_documents(tmp_path / "absent")
    with pytest.raises(ValueError, match="found none"):
        load_documents(tmp_path)
    file = tmp_path / "d.jsonl"
    file.write_text('{"title": "A", "text": "b"}\n{"title": "C"}\n')
    with pytest.raises(ValueError, match="line 2: a document has a text"):
        load_documents(file)
    file.write_text('{"title": "A", "text": "b"}\n')
    assert load_documents(file) == (Document(title="A", text="b"),)


def test_time_limits_kill_and_recover() -> None:
    limited = with_time_limit(time.sleep, seconds=2)
    assert limited(0) is None
    with pytest.raises(TimeoutError, match="longer than 2 seconds"):
        limited(600)
    assert limited(0) is None  # a new process took over


def test_errors_of_a_limited_function_come_back() -> None:
    mean = with_time_limit(statistics.mean, seconds=20)
    assert mean([1, 2, 6]) == 3
    with pytest.raises(WorkerError, match="StatisticsError"):
        mean([])
    worker = Worker("os:_exit")
    with pytest.raises(WorkerError, match="died"):
        worker.call(1, timeout=20)
    with pytest.raises(WorkerError, match="cannot be served"):
        Worker("no_such_module:f").call(timeout=20)


def test_a_fork_of_a_limited_function_does_not_answer() -> None:
    worker = Worker("os:fork")
    assert all(worker.call(timeout=60) > 0 for _ in range(5))
    worker.close()


def test_a_worker_serves_threads_in_turn() -> None:
    worker = Worker("operator:add")
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(worker.call(n, n, timeout=30)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [2 * n for n in range(8)]
    worker.close()


def test_only_importable_functions_can_be_limited() -> None:
    with pytest.raises(ValueError, match="top level"):
        with_time_limit(lambda: 1, seconds=1)
    with pytest.raises(ValueError, match="positive"):
        with_time_limit(time.sleep, seconds=0)


@linux
def test_workers_end_with_their_parent() -> None:
    code = (
        "from turnwise.envs.tools.worker import Worker\n"
        "worker = Worker('time:sleep')\nworker.call(0, timeout=20)\n"
        "print(worker._process.pid, flush=True)\nimport os\nos._exit(0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    pid = int(result.stdout)
    assert wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
