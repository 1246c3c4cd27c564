"""What the doors to other people's environments share: imports with advice, and random generators of their own."""

import hashlib
import importlib
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from turnwise.seeding import derive_seed

_global_generators = threading.Lock()


def require(module: str, *, extra: str) -> Any:
    """The module. Where it is not installed, the error names the extra that brings it.

    Example:
        >>> require("no_such_module", extra="gem")
        Traceback (most recent call last):
        ImportError: no_such_module is not installed; run: pip install 'turnwise[gem]'
    """
    try:
        with OwnRandom(0).drawing():  # some packages draw while they are imported
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"{module} is not installed; run: pip install 'turnwise[{extra}]'") from error


class OwnRandom:
    """States of Python's and numpy's global generators that belong to one episode.

    Environments that draw from the global generators would otherwise share them: what one episode meets would depend
    on who else is playing. Inside `drawing`, the global generators are this episode's; after it, everybody's again.

    Example:
        >>> first, second = OwnRandom(1), OwnRandom(1)
        >>> with first.drawing():
        ...     one = random.random()
        >>> with second.drawing():
        ...     one == random.random()
        True
    """

    def __init__(self, *seeds: int) -> None:
        seed = derive_seed(seeds[0] if seeds else 0, "own-random", *seeds[1:])
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state(legacy=False)

    @contextmanager
    def drawing(self) -> Generator[None]:
        with _global_generators:
            python, numpy = random.getstate(), np.random.get_state(legacy=False)
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
                random.setstate(python)
                np.random.set_state(numpy)


ATTEMPTS = 64


def start_in_split(start: Callable[[int], str], seed: int, split: str) -> str:
    """The opening of the first start that belongs to the split; `start` begins the episode of a foreign seed.

    The opening's text decides where a start belongs (a fifth is held out), so no opening is in both splits. Where
    all starts look alike, because the environment has one or hides what differs, the seeds of the splits still differ.

    Example:
        >>> starts = {split: {start_in_split(lambda n: str(n % 50), seed, split) for seed in range(100)}
        ...           for split in ("train", "val")}
        >>> starts["train"] & starts["val"]
        set()
    """
    held_out = split != "train"

    def number(attempt: int) -> int:
        return (2 * derive_seed(seed, "door/start", attempt) + held_out) % 2**31

    seen: set[str] = set()
    for attempt in range(ATTEMPTS):
        text = start(number(attempt))
        if (hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % 5 == 0) == held_out:
            return text
        seen.add(text)
        if attempt == ATTEMPTS // 4 and len(seen) == 1:
            break
    return start(number(0))


def unknown_name(kind: str, name: str, known: list[str]) -> ValueError:
    """The error for a name that a package does not know, with the nearest ones."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(known)}, such as {', '.join(known[:5])}"
    return ValueError(f"{kind} has no {name!r}; {hint}")
