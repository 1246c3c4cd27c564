"""`turnwise` and `python` in processes that need not import torch again: a server imports it once
and forks for every command.

A test starts `turnwise()` where it would start `python -m turnwise`, and `python()` where it would
start `python`; a shell finds `turnwise` in the folder `programs()`. Arguments, folder, environment,
input and output reach the forked process. INT, TERM and HUP reach it and what it has started; it is
killed with the command, which ends as it ends. A test that looks at the process itself or at its
imports needs a real start.

This file is the tests' helper, the server, and the command.
"""

import atexit
import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NamedTuple

FILE = os.path.abspath(__file__)
ADDRESS = "TURNWISE_WARM_SERVER"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def turnwise() -> list[str]:
    """The words before the arguments of `turnwise`. The first call starts the server."""
    return [*python(), "-m", "turnwise"]


def python() -> list[str]:
    """The words before `-c CODE`, `-m MODULE` or a file."""
    _address()
    return [sys.executable, "-S", "-E", FILE, "ask"]  # without packages it takes 20 ms


def programs() -> str:
    """A folder for the head of PATH, with the program `turnwise`."""
    return os.path.dirname(_address())


def _address() -> str:
    """The address of this process's server, which commands find in their environment."""
    owner, _, address = os.environ.get(ADDRESS, "").partition(":")
    return address if owner == str(os.getpid()) else _start()


def _start() -> str:
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="turnwise-warm-")
    address, program = os.path.join(folder, "socket"), os.path.join(folder, "turnwise")
    installed = os.path.join(os.path.dirname(sys.executable), "turnwise")
    with open(program, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FILE}" ask "{installed}" "$@"\n')
    os.chmod(program, 0o755)
    server = subprocess.Popen(
        [sys.executable, FILE, "serve", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()  # closes its input
        shutil.rmtree(folder)

    atexit.register(end)
    os.environ[ADDRESS] = f"{os.getpid()}:{address}"
    return address


def ask(words: list[str]) -> int:
    """Has the server run the command. Returns its exit code, or the signal that ended it, below
    zero."""
    # A signal may come as soon as the command runs, before it is known here which process it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.environ[ADDRESS].partition(":")[2])
        asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        data = json.dumps(asked).encode()
        socket.send_fds(server, [len(data).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(data)
        answers = server.makefile("rb")
        child = int(answers.readline())
        for number in FORWARDED:
            signal.signal(number, lambda told, _: os.killpg(child, told))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return int(answers.readline())


def end_as(status: int) -> None:
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(address: str) -> tuple[dict[str, Any], list[int]] | None:
    """Forks for every command. Returns what was asked, with its input and outputs, in the process
    of that command, and None in the server, once its own input ends."""
    import selectors

    import_everything()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
    ready.register(listener, selectors.EVENT_READ)
    running: dict[int, Running] = {}
    """By the handles of their processes and connections."""
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            if key.fd == listener.fileno():
                client, _ = listener.accept()
                asked, handles = read(client)
                child = os.fork()
                if child == 0:
                    # By their objects, which would else close these numbers again when they are
                    # collected, and by then another file may have them.
                    for one in (listener, ready, client):
                        one.close()
                    for found in set(running.values()):
                        os.close(found.ended)
                        found.client.close()
                    return asked, handles
                for handle in handles:
                    os.close(handle)
                with suppress(PermissionError):  # the child has done it, and is another program
                    os.setpgid(child, child)
                tell(client, child)
                found = Running(child, os.pidfd_open(child), client)
                for handle in (found.ended, client.fileno()):
                    running[handle] = found
                    ready.register(handle, selectors.EVENT_READ)
            elif key.fd not in running:
                for found in running.values():
                    found.kill()
                return None
            elif key.fd == running[key.fd].ended:
                found = running[key.fd]
                for handle in (found.ended, found.client.fileno()):
                    if running.pop(handle, None):
                        ready.unregister(handle)
                _, status = os.waitpid(found.child, 0)
                os.close(found.ended)
                tell(found.client, os.waitstatus_to_exitcode(status))
                found.client.close()
            else:  # the command was killed
                running.pop(key.fd).kill()
                ready.unregister(key.fd)


class Running(NamedTuple):
    child: int
    ended: int
    """Can be read once the child has ended."""
    client: socket.socket

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)


def import_everything() -> None:
    """What commands import once they know what to do. Nothing of it may start a thread, which a
    fork would lose."""
    from importlib import import_module

    from turnwise.cli.main import COMMANDS

    for name in (*COMMANDS.values(), "turnwise.api", "turnwise.testing.tiny"):
        import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all of it


def read(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, handles, _, _ = socket.recv_fds(client, 4, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += client.recv(size - len(data))
    return json.loads(data), handles


def tell(client: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # the command was killed
        client.sendall(b"%d\n" % number)


def become(asked: dict[str, Any], handles: list[int]) -> None:
    """Makes this process what one is that was just started."""
    os.setpgid(0, 0)
    for target, source in enumerate(handles):
        os.dup2(source, target)
        os.close(source)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [path for path in paths if path not in ("", *sys.path)]


def run(words: list[str]) -> int:
    """Runs what Python's own arguments say. Returns the status."""
    import runpy
    import traceback
    from types import ModuleType

    try:
        match words:
            case ["-m", module, *arguments]:
                sys.path.insert(0, os.getcwd())
                sys.argv = [module, *arguments]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", code, *arguments]:
                sys.path.insert(0, "")
                sys.argv = ["-c", *arguments]
                sys.modules["__main__"] = ModuleType("__main__")
                exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
            case [file, *arguments]:
                sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
                sys.argv = [file, *arguments]
                runpy.run_path(file, run_name="__main__")
            case _:
                raise ValueError("no program")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end_after(status: int) -> None:
    """Ends the process without Python's own end, which touches every page of what was imported."""
    import threading

    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    end_as(status)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        end_as(ask(sys.argv[2:]))
    elif command := serve(sys.argv[2]):
        become(*command)
        end_after(run(command[0]["words"]))
