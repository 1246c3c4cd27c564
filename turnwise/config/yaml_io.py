"""YAML in and out with YAML 1.2's scalars: `5e-7` is a number, `no` and `12:30` are text, doubled keys an error."""

import re
from typing import Any

import yaml

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
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


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _plain_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    # PyYAML's own reads a leading zero as octal.
    return int(str(loader.construct_scalar(node)))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _plain_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str) -> Any:
    """What the text says. Raises yaml.YAMLError, with line and column, where it is not YAML.

    Example:
        >>> parse_yaml("{lr: 5e-7, tags: [a, no], on: true, n: -3}")
        {'lr': 5e-07, 'tags': ['a', 'no'], 'on': True, 'n': -3}
    """
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: constructs plain data only


def dump_yaml(data: Any) -> str:
    """The data as YAML that `parse_yaml` reads back as it was.

    Example:
        >>> print(dump_yaml({"lr": 5e-7, "name": "5e-7"}), end="")
        lr: 5.0e-07
        name: '5e-7'
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
