# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""`turnwise doctor --machine`: hardware, installed extras, and the model size that fits."""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BYTES_PER_PARAMETER = 16
"""Full training in float32: weights, gradients and Adam's two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Facts about this machine."""

    system: str
    python: str
    cores: int
    memory: int
    """Bytes that this process may use."""
    free_memory: int
    free_disk: int
    """Bytes free in the current folder."""
    torch: str | None
    """Version, None where it cannot be imported."""
    torch_problem: str = ""
    cuda: str | None = None
    """The CUDA version that torch was built with."""
    gpus: tuple[Gpu, ...] = ()
    extras: tuple[tuple[str, tuple[tuple[str, str | None], ...]], ...] = ()
    """(extra, ((package, version or None), ...))."""


def look_around() -> Machine:
    """The machine that this process runs on."""
    total, free = memory_bytes()
    version, problem, cuda, gpus = _torch()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory=total,
        free_memory=free,
        free_disk=shutil.disk_usage(".").free,
        torch=version,
        torch_problem=problem,
        cuda=cuda,
        gpus=gpus,
        extras=tuple((extra, _versions(packages)) for extra, packages in read_extras().items()),
    )


def read_extras() -> dict[str, list[str]]:
    """The extras of the installed turnwise and the packages that each asks for.

    Example:
        >>> "trl" in read_extras()["trl"]
        True
    """
    extras: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("turnwise") or ():
        match = re.match(r"([A-Za-z0-9_.-]+).*;.*extra == ['\"]([^'\"]+)['\"]", line)
        if match and match[2] != "dev":
            extras.setdefault(match[2], []).append(match[1])
    return extras


def memory_bytes() -> tuple[int, int]:
    """(all, available) memory, within the limit of the control group where there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            table = dict(line.split(":", 1) for line in file)
        free = int(table["MemAvailable"].split()[0]) * 1024
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        if limit != "max" and int(limit) < total:
            total, free = int(limit), min(free, int(limit) - used)
    except (OSError, KeyError):
        pass  # not Linux, or no control group: keep the system's values
    return total, free


def describe(machine: Machine) -> list[str]:
    """The lines that `doctor --machine` prints."""
    lines = [
        f"system    {machine.system}, Python {machine.python}",
        f"cpu       {machine.cores} cores usable",
        f"memory    {_size(machine.memory)}, {_size(machine.free_memory)} available",
        f"disk      {_size(machine.free_disk)} free here",
        f"torch     {machine.torch or 'not importable: ' + machine.torch_problem}"
        + (
            f", CUDA {machine.cuda}" if machine.cuda else ", no CUDA build" if machine.torch else ""
        ),
    ]
    lines += [f"gpu       {gpu.name}, {_size(gpu.memory)}" for gpu in machine.gpus] or [
        "gpu       none"
    ]
    for extra, packages in machine.extras:
        found = ", ".join(
            f"{name} {version}" if version else f"{name} MISSING" for name, version in packages
        )
        lines.append(f"extra     {extra}: {found}")
    return [*lines, "", *possibilities(machine)]


def possibilities(machine: Machine) -> list[str]:
    """The features that work on this machine, and what each missing one needs.

    Example:
        >>> machine = Machine(system="Linux", python="3.11", cores=2, memory=8 << 30,
        ...     free_memory=4 << 30,
        ...                   free_disk=1 << 33, torch="2.13", extras=(("trl", (("trl", None),)),))
        >>> for line in possibilities(machine): print(line)
        can       train the embedded model: `turnwise train`
        can       train a model of up to about 107M parameters in full on the CPU, policy and critic (32 bytes each)
        cannot    use a GPU: torch sees none
        cannot    use extra trl: pip install 'turnwise[trl]'
    """  # noqa: E501
    lines: list[str] = []
    if machine.torch is None:
        return ["cannot    train: torch cannot be imported; pip install turnwise"]
    lines.append("can       train the embedded model: `turnwise train`")
    where = (
        ("on the GPU", sum(gpu.memory for gpu in machine.gpus[:1]))
        if machine.gpus
        else ("on the CPU", machine.free_memory)
    )
    # A fifth is left to activations and the KV cache; policy and critic have a trunk each.
    parameters = where[1] * 0.8 / (2 * BYTES_PER_PARAMETER)
    lines.append(
        f"can       train a model of up to about {_count(parameters)} parameters in full "
        f"{where[0]}, policy and critic "
        f"({2 * BYTES_PER_PARAMETER} bytes each)"
    )
    if machine.gpus:
        lines.append(f"can       use {len(machine.gpus)} GPU(s)")
    else:
        lines.append("cannot    use a GPU: " + ("torch sees none" if machine.torch else "no torch"))
    for extra, packages in machine.extras:
        missing = [name for name, version in packages if version is None]
        if missing:
            lines.append(f"cannot    use extra {extra}: pip install 'turnwise[{extra}]'")
        else:
            lines.append(f"can       use extra {extra}")
    return lines


def _torch() -> tuple[str | None, str, str | None, tuple[Gpu, ...]]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken build raises OSError for a missing library
        return None, str(error), None, ()
    gpus: list[Gpu] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found: Any = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(name=found.name, memory=found.total_memory))
    return torch.__version__, "", torch.version.cuda, tuple(gpus)


def _versions(packages: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    found: list[tuple[str, str | None]] = []
    for package in packages:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, None))
    return tuple(found)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _count(number: float) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
