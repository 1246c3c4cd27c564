"""Shared by the adapters of other libraries' environments: imports with an install hint, and
isolated random generators."""

import hashlib
import importlib
import logging
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np

from turnwise.seeding import derive_seed

logger = logging.getLogger(__name__)
F = TypeVar("F")
MOVE_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    *(SyntaxError, RecursionError),
)
"""Exceptions of a library on an unexpected move. Any other is a failure of the environment."""
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
        raise ImportError(
            f"{module} is not installed; run: pip install 'turnwise[{extra}]'"
        ) from error


def load_function(target: str | F, *, option: str) -> F:
    """The function that an option names as module:function, or that it holds already.

    Example:
        >>> load_function("math:sqrt", option="observe")(4.0)
        2.0
        >>> load_function("sqrt", option="observe")
        Traceback (most recent call last):
        ValueError: observe is a function, or module:function, got 'sqrt'
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(f"{option} is a function, or module:function, got {target!r}")
    return getattr(importlib.import_module(module), name)


class OwnRandom:
    """States of Python's and numpy's global generators that belong to one episode.

    Environments that draw from the global generators would otherwise share them: what one episode
    meets would depend on the others. Inside `drawing`, the global generators have this episode's
    states; after it, their previous ones.

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


SplitBy = Literal["opening", "seed"]
ATTEMPTS = 64
LONG_SECONDS = 5.0


def split_rule(name: str) -> SplitBy:
    """The rule of this name, for the option `split_by`.

    Example:
        >>> split_rule("luck")
        Traceback (most recent call last):
        ValueError: split_by is opening or seed, got 'luck'
    """
    if name not in get_args(SplitBy):
        raise ValueError(f"split_by is {' or '.join(get_args(SplitBy))}, got {name!r}")
    return cast(SplitBy, name)


def start_in_split(
    start: Callable[[int], str], seed: int, split: str, *, by: SplitBy = "opening"
) -> str:
    """The opening of a start that belongs to the split; `start` begins the episode of a foreign
    seed.

    By seed, that is one start: train begins at even foreign seeds and others at odd ones, and
    nothing keeps two of them from looking alike. By opening, the text decides where a start belongs
    (a fifth is held out), so no opening is in both splits; starts are made until one fits, 1.25 of
    them on average to train on and 5 to be tested on. Where all starts look alike, because the
    environment has one or hides what differs, the seeds decide after all.

    Example:
        >>> def start(n):
        ...     return str(n % 50)
        >>> starts = {split: {start_in_split(start, seed, split) for seed in range(100)}
        ...           for split in ("train", "val")}
        >>> starts["train"] & starts["val"]
        set()
        >>> [start_in_split(lambda n: str(n % 2), 5, side, by="seed") for side in ("train", "val")]
        ['0', '1']
    """
    held_out = split != "train"

    def number(attempt: int) -> int:
        return (2 * derive_seed(seed, "door/start", attempt) + held_out) % 2**31

    if by == "seed":
        return start(number(0))
    seen: set[str] = set()
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        text = start(number(attempt))
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).digest()
        if (digest[0] % 5 == 0) == held_out:
            return text
        seen.add(text)
        if attempt and (spent := time.monotonic() - began) > LONG_SECONDS:
            logger.warning(
                "%d starts and %.0f s for one of split %r; split_by: seed among the environment's "
                "options takes the first",
                attempt + 1,
                spent,
                split,
            )
            began = float("inf")  # said once is enough
        if attempt == ATTEMPTS // 4 and len(seen) == 1:
            break
    return start(number(0))


def unknown_name(kind: str, name: str, known: list[str]) -> ValueError:
    """The error for a name that a package does not know, with the nearest ones."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=3, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"there are {len(known)}, such as {', '.join(known[:5])}"
    )
    return ValueError(f"{kind} has no {name!r}; {hint}")
