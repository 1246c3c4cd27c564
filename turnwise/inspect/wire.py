"""Answers as JSON, whatever a run's files held."""

import json
import math
from typing import Any, cast

from turnwise.types import Json


def to_bytes(value: Json) -> bytes:
    """The value as JSON that every browser reads: numbers are finite, and halves of characters are
    escaped.

    Example:
        >>> to_bytes({"reward": float("inf"), "text": "\\ud83c"})
        b'{"reward":null,"text":"\\\\ud83c"}'
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast(list[Any], value)]
    return value
