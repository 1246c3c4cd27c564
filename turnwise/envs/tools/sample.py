"""Random calls of tools by their schemas, for players who know the form and nothing else."""

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, cast

from turnwise.envs.tools.calls import CLOSE, OPEN
from turnwise.types import Json

Schema = Mapping[str, Any]
DEEPEST = 4
"""Nesting of drawn arguments; deeper parts are left empty."""
MAX_ANSWER = 400
"""Characters of a tool's answer that are repeated as a final reply."""


def random_reply(
    tools: Sequence[Schema], messages: Sequence[Mapping[str, Json]], rng: Random
) -> str:
    """A random call; once a tool has answered, every other time its answer instead, which ends the
    conversation.

    Text arguments are words of what the user said, because that is where names come from.

    Example:
        >>> from turnwise.envs.tools.calls import make_tool
        >>> def stock(item: str, warehouse: int = 0) -> int:
        ...     return 3
        >>> said = [{"role": "user", "content": "apples"}]
        >>> random_reply([make_tool(stock).schema], said, Random(1))
        '<tool_call>{"name": "stock", "arguments": {"item": "apples", "warehouse": 7}}</tool_call>'
    """
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    if not tools or (answers and rng.random() < 0.5):
        return str(answers[-1] if answers else "done")[:MAX_ANSWER]
    function = cast(Schema, rng.choice(tools)["function"])
    texts = [str(one["content"]) for one in messages if one["role"] == "user"]
    words = re.findall(r"\w+", " ".join(texts)) or ["text"]
    parameters = cast(Schema, function.get("parameters") or {})
    arguments = random_value({"type": "object", **parameters}, rng, words=words, root=parameters)
    return f"{OPEN}{json.dumps({'name': function['name'], 'arguments': arguments})}{CLOSE}"


def random_value(
    schema: Schema, rng: Random, *, words: Sequence[str], root: Schema, depth: int = 0
) -> Json:
    """A value that a JSON schema allows, as far as the usual keywords say.

    Example:
        >>> five = {"type": "integer", "minimum": 5, "maximum": 5}
        >>> random_value(five, Random(0), words=[], root={})
        5
        >>> random_value({"enum": ["a"]}, Random(0), words=[], root={})
        'a'
    """
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        found = cast(Schema, root.get("$defs", {}).get(name, {}))
        if depth > DEEPEST:
            return None
        return random_value(found, rng, words=words, root=root, depth=depth + 1)
    for key in ("enum", "examples"):
        if schema.get(key):
            return rng.choice(cast("list[Json]", schema[key]))
    if "const" in schema:
        return schema["const"]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            chosen = rng.choice(cast("list[Schema]", schema[key]))
            return random_value(chosen, rng, words=words, root=root, depth=depth)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(cast("list[str]", kind))
    match kind:
        case "object":
            return _object(schema, rng, words=words, root=root, depth=depth)
        case "array":
            items = cast(Schema, schema.get("items") or {})
            least = int(schema.get("minItems", 0 if depth > DEEPEST else 1))
            count = 0 if depth > DEEPEST else rng.randint(least, max(least, 2))
            return [
                random_value(items, rng, words=words, root=root, depth=depth + 1)
                for _ in range(count)
            ]
        case "integer":
            low = int(schema.get("minimum", 0))
            return rng.randint(low, int(schema.get("maximum", max(low, 9))))
        case "number":
            low = float(schema.get("minimum", 0.0))
            return round(rng.uniform(low, float(schema.get("maximum", max(low, 9.0)))), 2)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case _:
            return rng.choice(words) if words else "text"


def _object(
    schema: Schema, rng: Random, *, words: Sequence[str], root: Schema, depth: int
) -> dict[str, Json]:
    """The required properties, and each optional one every other time."""
    required = set(cast("list[str]", schema.get("required") or []))
    properties = cast("dict[str, Schema]", schema.get("properties") or {})
    found: dict[str, Json] = {}
    for name, inner in properties.items():
        if name in required or (depth <= DEEPEST and rng.random() < 0.5):
            found[name] = random_value(inner, rng, words=words, root=root, depth=depth + 1)
    return found
