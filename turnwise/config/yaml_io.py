# pyright: reportUnknownMemberType=false
"""Reads and writes YAML with YAML 1.2's scalars: `5e-7` is a number, `no` and `12:30` are text.
Duplicate keys are an error."""

import re
from typing import Any, cast

import yaml

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
MAX_NODES, MAX_DEPTH = 1_000_000, 100
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = re.compile(r"^(?:<<)$")
_SCALARS = (
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:merge", _MERGE, ["<"]),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The node's value. PyYAML raises plain ValueErrors for bad scalars; this adds line and
        column."""
        try:
            return cast(Any, super()).construct_object(node, deep=deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"invalid value: {error}", node.start_mark
            ) from None


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _plain_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    # PyYAML's own constructor reads a leading zero as octal.
    return int(str(loader.construct_scalar(node)))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _plain_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str) -> Any:
    """The parsed data. Raises yaml.YAMLError, with line and column, if the text is not YAML, or if
    it expands to too many values: nested aliases grow exponentially.

    Example:
        >>> parse_yaml("{lr: 5e-7, tags: [a, no], on: true, n: -3}")
        {'lr': 5e-07, 'tags': ['a', 'no'], 'on': True, 'n': -3}
    """
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader: constructs plain data only
    except RecursionError:
        raise yaml.YAMLError(f"it nests deeper than {MAX_DEPTH} levels") from None
    _refuse_too_much(data)
    return data


def _refuse_too_much(data: Any) -> None:
    """Counts values as a reader sees them: a list with several aliases counts several times."""
    level, count = [data], 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if not level:
            return
        if count > MAX_NODES:
            raise yaml.YAMLError(f"it expands to more than {MAX_NODES} values")
        below: list[Any] = []
        for node in level:
            below += (
                node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            )
        level = below
    raise yaml.YAMLError(f"it nests deeper than {MAX_DEPTH} levels")


def dump_yaml(data: Any) -> str:
    """The data as YAML that `parse_yaml` reads back unchanged.

    Example:
        >>> print(dump_yaml({"lr": 5e-7, "name": "5e-7"}), end="")
        lr: 5.0e-07
        name: '5e-7'
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
