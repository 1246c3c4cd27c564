"""Seeds from named streams. No `hash()`, no global generator: the same names give the same number
everywhere."""

import hashlib


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for one purpose, from the run's seed and what it is for.

    Example:
        >>> derive_seed(0, "task", 3, 1) == derive_seed(0, "task", 3, 1)
        True
        >>> derive_seed(0, "task", 3, 1) == derive_seed(0, "task", 31)
        False
    """
    name = "\x1f".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
