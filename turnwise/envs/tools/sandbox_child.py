# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""Sandbox launcher: drops privileges and access, then runs the model's code. Started by
python_tool.py as a script.

On Linux the code gets namespaces of its own: no network but an unconnected one, no other processes
to see or signal, and a root with nothing in it but Python, the system's programs (both read-only)
and the working directory, which is a small file system in memory. A filter of system calls refuses
sockets that do not heed namespaces. Three processes take part:

    launcher (old namespaces) -> init (process 1 of the new ones; its death ends all in them) -> the
    code

Where the kernel refuses namespaces, an audit hook inside the interpreter stands in. That stops code
that plays by the rules of Python, not code that sets out to break them; the report that goes back
says which it was.

Standard library only: the script runs isolated from the package.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import struct
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
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
NAMESPACES = 0x7E020000
"""Flags of clone for new namespaces."""
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix"),
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")),
)
"""Paths of the system that programs need besides Python. The sandbox's root has no others."""


def _numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (pair.split("=") for pair in text.split())}


_SAME = """clone3=435 io_uring_setup=425 io_uring_enter=426 io_uring_register=427 open_tree=428
    move_mount=429 fsopen=430 fsconfig=431 fsmount=432 fspick=433 pidfd_getfd=438 mount_setattr=442
    """
CALLS = {
    "x86_64": (
        0xC000003E,
        _numbers(
            _SAME
            + """shmget=29 socket=41 socketpair=53 clone=56 semget=64 msgget=68 ptrace=101
            pivot_root=155 chroot=161 mount=165 umount2=166 swapon=167 reboot=169 init_module=175
            delete_module=176 kexec_load=246 add_key=248 request_key=249 keyctl=250 unshare=272
            perf_event_open=298 open_by_handle_at=304 setns=308 process_vm_readv=310
            process_vm_writev=311 finit_module=313 memfd_create=319 kexec_file_load=320 bpf=321
            userfaultfd=323"""
        ),
    ),
    "aarch64": (
        0xC00000B7,
        _numbers(
            _SAME
            + """msgget=186 semget=190 shmget=194 socket=198 socketpair=199 clone=220 ptrace=117
            pivot_root=41 chroot=51 mount=40 umount2=39 swapon=224 reboot=142 init_module=105
            delete_module=106 kexec_load=104 add_key=217 request_key=218 keyctl=219 unshare=97
            perf_event_open=241 open_by_handle_at=265 setns=268 process_vm_readv=270
            process_vm_writev=271 finit_module=273 memfd_create=279 kexec_file_load=294 bpf=280
            userfaultfd=282"""
        ),
    ),
}
"""Of each machine, its name for itself and the numbers of calls that are filtered."""
FIRST_UID, NUM_UIDS = 61_000, 4_000
"""A root launcher gives each run a user of its own, so that limits on processes count its own
alone."""
REFUSED = 125

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
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
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except (OSError, AttributeError):
        return False
    return True


def close_file_systems(work: str, stash: str, file_mb: int) -> bool:
    """True where the code has a root of its own: Python and the system's programs, read-only, and
    the working directory. Homes, temporary folders, and the sockets and pipes in them do not exist
    there. Called by process 1, as only it can mount its /proc."""
    try:
        _mount("none", "/", None, MS_REC | MS_PRIVATE)
        _mount("tmpfs", stash, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        _show_system(stash)
        os.mkdir(f"{stash}/proc")
        with contextlib.suppress(OSError):  # some containers forbid it: then there is none
            _mount("proc", f"{stash}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        inside = stash + work
        os.makedirs(inside, exist_ok=True)
        with open("/proc/self/mountinfo", "rb") as file:
            places = [_unescaped(line.split()[4]) for line in file]
        places = [place for place in places if f"{place}/".startswith(f"{stash}/")]
        for place in dict.fromkeys(places):
            _make_read_only(place)
        # Where the root itself is not among them, the list is not what was mounted.
        if stash not in places or not all(_is_read_only(place) for place in places):
            return False
        _mount("tmpfs", inside, "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_mb}m,mode=1777")
        os.chdir(stash)
        _call("pivot_root", b".", b".")
        _call("umount2", b".", MNT_DETACH)
        os.chdir("/")
    except (OSError, AttributeError):
        return False
    return True


def _show_system(root: str) -> None:
    """Puts what programs need under the new root, as links and mounts of what is there."""
    for path in (*SYSTEM, *_python_paths()):
        target = root + path
        if os.path.lexists(target) or not os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if path in SYSTEM and os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path):
            os.mkdir(target)
            _mount(path, target, None, MS_BIND | MS_REC)
        else:
            with open(target, "x"):
                _mount(path, target, None, MS_BIND)
    for name in ("fd", "stdin", "stdout", "stderr"):
        number = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}[name]
        os.symlink(f"/proc/self/fd{number}", f"{root}/dev/{name}")


def _unescaped(path: bytes) -> str:
    """A path as the kernel's list of mounts has it: in bytes, its blanks as octal numbers."""
    return os.fsdecode(path.decode("unicode_escape").encode("latin-1"))


def _make_read_only(place: str) -> None:
    try:
        kept = os.statvfs(place).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        _mount(None, place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
    except OSError:
        # Hidden under another mount, or not reachable; what matters is asked of each place
        # afterwards.
        return


def _is_read_only(place: str) -> bool:
    try:
        return bool(os.statvfs(place).f_flag & MS_RDONLY)
    except OSError:
        return not os.path.exists(place)


def _python_paths() -> list[str]:
    prefixes = (sys.base_prefix, sys.prefix)
    return list(dict.fromkeys([*prefixes, *map(os.path.realpath, prefixes)]))


def _closed_ancestor(path: str) -> str | None:
    """The first directory on the way to a path that other users may not pass."""
    parts = path.strip("/").split("/")
    for end in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:end])
        if not os.stat(place).st_mode & 0o001:
            return place
    return None


def filter_calls(*, network: bool) -> bool:
    """True where the kernel now refuses calls that lead out of namespaces: sockets that are not of
    the internet (Unix, vsock, netlink), further namespaces and mounts, keys, and io_uring, which
    makes calls without making them; and calls for memory that counts towards no process's limit
    (System V, memfd). `network`: sockets of the internet are left, since they lead nowhere."""
    if not LINUX or os.uname().machine not in CALLS:
        return False
    arch, names = CALLS[os.uname().machine]
    allow, refuse, absent = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    load, equal, at_least, any_bit, mask, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    families = (socket.AF_INET, socket.AF_INET6) if network else (0, 0)
    number, call_arch, first, second = 0, 4, 16, 24  # where they stand in what the kernel tells
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, call_arch),
        *((equal, 1, 0, arch), (answer, 0, 0, refuse)),  # calls of another machine's numbering
        (load, 0, 0, number),
        *((at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)),
        *((equal, 0, 1, names["clone3"]), (answer, 0, 0, absent)),  # libraries use clone instead
    ]
    for name, call in names.items():
        if name not in ("socket", "socketpair", "clone", "clone3"):
            program += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    program += [
        *((equal, 0, 4, names["clone"]), (load, 0, 0, first)),
        *((any_bit, 0, 1, NAMESPACES), (answer, 0, 0, refuse), (answer, 0, 0, allow)),
        *((equal, 0, 5, names["socketpair"]), (load, 0, 0, second), (mask, 0, 0, 0xF)),
        *((equal, 0, 1, socket.SOCK_STREAM), (answer, 0, 0, allow), (answer, 0, 0, refuse)),
        *((equal, 0, 5, names["socket"]), (load, 0, 0, first)),
        *((equal, 1, 0, families[0]), (equal, 0, 1, families[1])),
        *((answer, 0, 0, allow), (answer, 0, 0, refuse)),
        (answer, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HP", len(program), ctypes.addressof(buffer))
    return _libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0) == 0


def drop_privileges(user: int | None) -> None:
    """Becomes this user where one is given, and gives up all capabilities and the means to gain new
    ones."""
    if LINUX:
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for capability in range(64):
            _libc.prctl(
                PR_CAPBSET_DROP, capability, 0, 0, 0
            )  # fails past the last capability there is
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
    *(
        "socket.",
        "subprocess.",
        "ctypes.",
        "pty.",
        "shutil.chown",
        "resource.setrlimit",
        "signal.pthread_kill",
    ),
    *(
        "os.fork",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.kill",
        "os.link",
        "os.symlink",
        "os.chown",
    ),
)
CHANGING = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.chmod",
    "os.utime",
    "shutil.",
)
"""Events of changes to files, by their paths; allowed within the working directory."""


def guard_in_python(work: str) -> None:
    """The stand-in: refuses network, processes, foreign functions and writing outside the working
    directory."""
    inside = os.path.realpath(work) + os.sep

    def check(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            target = os.path.realpath(os.fsdecode(path))
            if not (target + os.sep).startswith(inside) and target != os.devnull:
                raise PermissionError(
                    f"files may be changed in the working directory only, not at {target}"
                )

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
        print(
            "".join([lines[0], *[line for line in lines[1:] if __file__ not in line]]),
            end="",
            file=sys.stderr,
        )
        return 1
    return 0


def _code_process(
    code: str, spec: dict[str, Any], report_fd: int, *, user: int, namespaces: bool, files: bool
) -> int:
    root = os.getuid() == 0
    # Without mounts of its own, a user that is not root may be unable to read Python itself.
    drop_user = root and (files or all(_closed_ancestor(path) is None for path in _python_paths()))
    os.chdir(spec["work"])
    if drop_user and not files:
        os.chmod(spec["work"], 0o777)
    set_limits(spec)
    drop_privileges(user if drop_user else None)
    _end_with_parent()  # a change of user takes it back
    by_kernel = namespaces and files
    filtered = spec["namespaces"] and filter_calls(network=namespaces)
    report = {
        "network": "namespace" if namespaces else "seccomp" if filtered else "python",
        "files": "own root" if files else "python",
        "sockets": "seccomp" if filtered else "python",
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


def _end_with_parent() -> None:
    """Has this process killed when the one that started it ends."""
    if LINUX:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


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
    _end_with_parent()
    if os.getppid() != spec["parent"]:
        return 1

    def init() -> int:
        _end_with_parent()
        if not namespaces and os.getppid() != launcher:
            return 1
        files = namespaces and close_file_systems(spec["work"], spec["stash"], spec["file_mb"])
        user = FIRST_UID + launcher % NUM_UIDS
        return _child(
            lambda: _code_process(
                code, spec, report_fd, user=user, namespaces=namespaces, files=files
            )
        )

    return _child(init)


if __name__ == "__main__":
    os._exit(main())
