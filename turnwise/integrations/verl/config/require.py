"""Checks the installed packages before anything heavy is imported or started."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

OLDEST, BELOW = (0, 9, 1), (0, 10)
"""The versions of verl whose V1 trainer this integration was written against: from OLDEST on, below
BELOW."""
PLUGIN = "turnwise.integrations.verl.engines.plugin"
"""The module that VERL_USE_EXTERNAL_MODULES must name, so that every process of a run knows our
parts."""

PLATFORM = "VERL_PLATFORM"
"""verl's variable that chooses the platform of a process."""
ENGINES = {
    "vllm": ("vllm", "vllm 0.24.0"),
    "sglang": ("sglang", "sglang 0.5.12"),
    "trtllm": ("tensorrt_llm", "tensorrt_llm"),
}
"""verl's rollout engines: the module that each needs, and the release that verl 0.9.1 was written
against."""


class VerlUnavailableError(ImportError):
    """verl cannot be used here. The message says what is missing and how to get it."""


def require_verl() -> None:
    """Returns where verl can be used.

    Raises:
        VerlUnavailableError: verl, Ray or TransferQueue is missing, or verl is too old or too new.
    """
    for module, package in (("verl", "verl"), ("ray", "ray"), ("transfer_queue", "TransferQueue")):
        if find_spec(module) is None:
            raise VerlUnavailableError(
                f"the verl backend needs {package}, which is not installed; run: pip install "
                "'turnwise[verl]'"
            )
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise VerlUnavailableError(
            "a module named verl can be imported, but no package verl is installed, so its version "
            "is unknown; "
            "run: pip install 'turnwise[verl]'"
        ) from None
    check_version(found)


def require_engine(name: str) -> None:
    """Checks that the engine is installed. Engines unknown to verl are not checked.

    Raises:
        VerlUnavailableError: it is missing; a worker would find out only after minutes.

    Example:
        >>> require_engine("hf")
    """
    module, release = ENGINES.get(name, ("", ""))
    if module and find_spec(module) is None:
        raise VerlUnavailableError(
            f"actor_rollout_ref.rollout.name is {name}, but the package {module} is not installed "
            "here; install it "
            f"(verl {_dotted(OLDEST)} expects {release}), or name hf, which needs none"
        )


def check_version(found: str) -> None:
    """Returns where this version of verl is one we were written against.

    Example:
        >>> check_version("0.9.1")
        >>> check_version("0.7.0")
        Traceback (most recent call last):
            ...
        turnwise.integrations.verl.config.require.VerlUnavailableError: verl 0.7.0 is too old: ...
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    wanted = (
        f"verl >= {_dotted(OLDEST)}, < {_dotted(BELOW)} is needed; run: pip install "
        f"'verl=={_dotted(OLDEST)}'"
    )
    if numbers < OLDEST:
        raise VerlUnavailableError(
            f"verl {found} is too old: its trainer has no V1 hooks to build on. {wanted}"
        )
    if numbers >= BELOW:
        raise VerlUnavailableError(
            f"verl {found} is too new: its V1 trainer was not checked with turnwise. {wanted}"
        )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
