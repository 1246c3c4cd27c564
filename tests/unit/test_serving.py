"""Servers in the foreground: what signals do."""

import signal
import subprocess

import warm

SERVER = """
import os, signal, sys, time
from turnwise.cli.serving import serve_until_stopped

class Server:
    def __enter__(self): return self
    def __exit__(self, *error):
        print("closing", flush=True)
        if sys.argv[1] == "hangs":
            time.sleep(600)
    def wait(self, seconds):
        time.sleep(seconds)
        return sys.argv[1] == "ends"

def started():
    print("serving", flush=True)
    if sys.argv[1] == "at-once":
        os.kill(os.getpid(), signal.SIGTERM)
        print("undisturbed", flush=True)

serve_until_stopped(Server(), started)
print("over", flush=True)
"""


def start(how: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*warm.python(), "-c", SERVER, how], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_signal_while_it_starts_interrupts_no_import() -> None:
    """A KeyboardInterrupt there left the import lock locked, and the server never ended."""
    with start("at-once") as server:
        said = server.communicate()[0]
    assert said.split() == ["serving", "undisturbed", "stopping", "closing", "over"]
    assert server.returncode == 0


def test_a_server_that_ends_by_itself_is_left() -> None:
    with start("ends") as server:
        assert server.communicate()[0].split() == ["serving", "closing", "over"]


def test_the_second_signal_ends_a_server_that_does_not_close() -> None:
    with start("hangs") as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "serving\n"
        server.send_signal(signal.SIGINT)
        assert [server.stdout.readline() for _ in range(2)] == ["stopping\n", "closing\n"]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
