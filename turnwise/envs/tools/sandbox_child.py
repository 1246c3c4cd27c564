"""What runs in front of the model's code: shuts the doors, then runs it. Started by python_tool.py as a script.

On Linux the code gets namespaces of its own: no network but an unconnected one, no other processes to see or signal,
all file systems read-only but its working directory, which is a small one in memory. Three processes take part:

    launcher (old namespaces) -> init (process 1 of the new ones; its death ends all in them) -> the code

Where the kernel refuses namespaces, an audit hook inside the interpreter stands in. That stops code that plays by the
rules of Python, not code that sets out to break them; the report that goes back says which it was.

Standard library only: the script runs isolated from the package.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
FIRST_UID, NUM_UIDS = 61_000, 4_000
"""A root launcher gives each run a user of its own, so that limits on processes count its own alone."""
REFUSED = 125

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def enter_namespaces() -> bool:
    """True where network, processes, mounts and IPC are now apart from the rest of the machine."""
    flags = NEWNS | NEWIPC | NEWPID | NEWNET
    uid, gid = os.getuid(), os.getgid()
    try:
        if uid == 0:
            _call("unshare", flags)
            return True
        _call("unshare", flags | NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except (OSError, AttributeError):
        return False
    return True


def close_file_systems(work: str, stash: str, file_mb: int, *, drop_user: bool) -> bool:
    """True where nothing but the working directory can be written any more."""
    try:
        _mount("none", "/", None, MS_REC | MS_PRIVATE)
        if drop_user:
            _expose_python(stash)
        if os.path.isdir("/run") and not any(path.startswith("/run/") for path in _python_paths()):
            _mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")  # sockets of services
        _mount("tmpfs", work, "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_mb}m,mode=1777")
        with open("/proc/self/mountinfo") as file:
            places = [line.split()[4].encode().decode("unicode_escape") for line in file]
        for place in dict.fromkeys(places):
            if place != work:
                _make_read_only(place)
        return all(place == work or _is_read_only(place) for place in places)
    except OSError:
        return False


def _make_read_only(place: str) -> None:
    try:
        kept = os.statvfs(place).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        _mount(None, place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
    except OSError:
        return  # hidden under another mount, or not reachable; what matters is asked of each place afterwards


def _is_read_only(place: str) -> bool:
    try:
        return bool(os.statvfs(place).f_flag & MS_RDONLY)
    except OSError:
        return not os.path.exists(place)


def _python_paths() -> list[str]:
    return list(dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)))


def _closed_ancestor(path: str) -> str | None:
    """The first directory on the way to a path that other users may not pass."""
    parts = path.strip("/").split("/")
    for end in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:end])
        if not os.stat(place).st_mode & 0o001:
            return place
    return None


def _expose_python(stash: str) -> None:
    """Where Python lives under a closed directory (a home), an empty one that holds only Python takes its place."""
    for number, path in enumerate(_python_paths()):
        closed = _closed_ancestor(path)
        if closed is None:
            continue
        kept = os.path.join(stash, str(number))
        os.mkdir(kept)
        _mount(path, kept, None, MS_BIND | MS_REC)
        _mount("tmpfs", closed, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        os.makedirs(path, exist_ok=True)
        _mount(kept, path, None, MS_BIND | MS_REC)
        _call("umount2", kept.encode(), MNT_DETACH)


def drop_privileges(user: int | None) -> None:
    """Becomes this user where one is given, and gives up all capabilities and the means to gain new ones."""
    if LINUX:
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for capability in range(64):
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails past the last capability there is
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if LINUX:
        _libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def set_limits(spec: dict[str, Any]) -> None:
    megabyte = 1 << 20
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(spec["seconds"]) + 1),
        (resource.RLIMIT_AS, spec["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, spec["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_NPROC, spec["processes"]),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


FORBIDDEN = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "shutil.chown", "resource.setrlimit", "signal.pthread_kill"),
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.link", "os.symlink", "os.chown"),
)
CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.utime", "shutil.")
"""Events of changes to files, by their paths; allowed within the working directory."""


def guard_in_python(work: str) -> None:
    """The stand-in: refuses network, processes, foreign functions and writing outside the working directory."""
    inside = os.path.realpath(work) + os.sep

    def check(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            target = os.path.realpath(os.fsdecode(path))
            if not (target + os.sep).startswith(inside) and target != os.devnull:
                raise PermissionError(f"files may be changed in the working directory only, not at {target}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            if flags & changes if flags else mode != "r":
                check(path)
        elif event.startswith(CHANGING):
            for path in args:
                check(path)
        elif event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)


def run_code(code: str, spec: dict[str, Any]) -> int:
    """Runs the code as a main program; its exit status."""
    import traceback
    import types

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - text files have it
    sys.argv = ["main.py"]
    sys.path.insert(0, spec["work"])
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "main.py", "exec"), main_module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        lines = traceback.format_exception(error)
        print("".join([lines[0], *[line for line in lines[1:] if __file__ not in line]]), end="", file=sys.stderr)
        return 1
    return 0


def _code_process(code: str, spec: dict[str, Any], report_fd: int, *, user: int, namespaces: bool, files: bool) -> int:
    root = os.getuid() == 0
    # Without mounts of its own, a user that is not root may be unable to read Python itself.
    drop_user = root and (files or all(_closed_ancestor(path) is None for path in _python_paths()))
    os.chdir(spec["work"])
    if drop_user and not files:
        os.chmod(spec["work"], 0o777)
    set_limits(spec)
    drop_privileges(user if drop_user else None)
    by_kernel = namespaces and files
    report = {
        "network": "namespace" if namespaces else "python",
        "files": "read-only mounts" if files else "python",
        "processes": "kernel" if drop_user or not root else "time limit" if by_kernel else "python",
        "kill": "namespace" if namespaces else "process group",
    }
    os.write(report_fd, json.dumps(report).encode())
    os.close(report_fd)
    if spec["require"] and report != spec["require"]:
        return REFUSED
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not by_kernel:
        guard_in_python(spec["work"])
    return run_code(code, spec)


def _child(run: Any) -> int:
    """The exit status of a forked child that runs `run`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = run()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
    _, result = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(result)
    return code if code >= 0 else 128 - code


def main() -> int:
    spec, report_fd = json.loads(sys.argv[1]), int(sys.argv[2])
    code = sys.stdin.read()
    launcher = os.getpid()
    namespaces = spec["namespaces"] and enter_namespaces()
    files = namespaces and close_file_systems(spec["work"], spec["stash"], spec["file_mb"], drop_user=os.getuid() == 0)

    def code_process() -> int:
        user = FIRST_UID + launcher % NUM_UIDS
        return _code_process(code, spec, report_fd, user=user, namespaces=namespaces, files=files)

    def init() -> int:
        if LINUX:
            _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if not namespaces and os.getppid() != launcher:
            return 1
        if namespaces:
            with contextlib.suppress(OSError):  # some containers forbid it; the old one is read-only by now
                _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        return _child(code_process)

    return _child(init)


if __name__ == "__main__":
    os._exit(main())
