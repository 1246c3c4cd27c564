"""Analyses a chat template's syntax tree: how it can change the content of messages.

Most templates put contents between constant texts that depend only on the roles. If the analysis
proves that, a conversation is rendered by joining strings. Otherwise the template renders it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, cast

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentRules:
    """Conditions under which a text passes through a template unchanged: it is not blank, contains
    none of the literals, and does not begin or end with an edge.

    Example:
        >>> body = "{{ m.role + m.content | trim }}"
        >>> rules = read_template("{% for m in messages %}" + body + "{% endfor %}")
        >>> rules.trims, rules.literals
        (True, frozenset())
        >>> read_template("{% for m in messages %}{{ m.content[:3] }}{% endfor %}") is None
        True
    """

    literals: frozenset[str]
    """Strings that the template searches for in contents."""
    edges: frozenset[str]
    """Characters that it strips from contents."""
    trims: bool
    """True if it strips whitespace from contents."""
    clocks: tuple[str, ...]
    """Formats of the times that it writes."""


class _Kind(Enum):
    """How a value in a template depends on contents."""

    CONST = 0  # the same for all contents
    MESSAGES = 1
    MESSAGE = 2
    CONTENT = 3  # exactly the content of a message, if it meets the rules
    PIECES = 4  # a content split at a literal: a list of one
    MIXED = 5  # contents and constants joined: for output only
    NAMESPACE = 6


_Kinds = frozenset[_Kind]
_CONST, _CONTENT, _MIXED = (frozenset([kind]) for kind in (_Kind.CONST, _Kind.CONTENT, _Kind.MIXED))
_MESSAGE, _MESSAGES = frozenset([_Kind.MESSAGE]), frozenset([_Kind.MESSAGES])
_TEXT = _CONST | _CONTENT | _MIXED
_TYPE_TESTS = {"string": True, "defined": True, "iterable": True, "sequence": True} | dict.fromkeys(
    ("undefined", "none", "mapping", "number", "boolean", "integer", "float", "true", "false"),
    False,
)  # their result for a content
_ARITHMETIC = (
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Pow,
    nodes.Neg,
    nodes.Pos,
)
_REFUSED_FILTERS = ("random", "safe", "e", "escape", "forceescape", "xmlattr", "urlize")
"""Filters that are random, or whose result escapes the strings that it is joined with."""
_LITERAL_NODES = (nodes.Const, nodes.Neg, nodes.Tuple, nodes.List)


class _NotUnderstood(Exception):
    """The analysis cannot prove that contents pass this template unchanged."""


class _Generation(Extension):
    """`{% generation %}` marks the model's replies for training masks; the text stays the same."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


EXTENSIONS = (_Generation, loopcontrols)
"""Extensions of Jinja that templates use."""


@lru_cache(maxsize=32)
def read_template(source: str) -> ContentRules | None:
    """The rules under which contents pass unchanged; None if the analysis fails.

    Possible values of variables are merged over the whole template, in any order, so that every
    execution path is covered.
    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=list(EXTENSIONS))
    reader = _Reader()
    try:
        tree = environment.parse(source)
        while reader.changed:
            reader.changed = False
            reader.read(tree.body)
    except (TemplateError, _NotUnderstood):
        return None
    return ContentRules(
        literals=frozenset(reader.literals),
        edges=frozenset(reader.edges),
        trims=reader.trims,
        clocks=tuple(sorted(reader.clocks)),
    )


class _Reader:
    def __init__(self) -> None:
        self.changed = True
        self.literals: set[str] = set()
        self.edges: set[str] = set()
        self.clocks: set[str] = set()
        self.trims = False
        self._names: dict[str, _Kinds] = {"messages": _MESSAGES}
        self._macros: dict[str, nodes.Macro] = {}

    # Statements

    def read(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                for child in node.nodes:
                    self._need(self.kinds(child), _TEXT)
            case nodes.If():
                self._branches([node, *node.elif_], node.else_)
            case nodes.For():
                self._loop(node)
            case nodes.Assign():
                self._assign(node.target, node.node)
            case nodes.AssignBlock(filter=None):
                self.read(node.body)
                self._bind(node.target, _MIXED)
            case nodes.Macro():
                self._macro(node)
            case nodes.ExprStmt():
                self.kinds(node.node)
            case nodes.Break() | nodes.Continue():
                pass
            case _:
                raise _NotUnderstood(type(node).__name__)

    def _branches(self, tests: Sequence[nodes.If], otherwise: Sequence[nodes.Node]) -> None:
        for branch in tests:
            self._condition(branch.test)
            truth = self._truth(branch.test)
            if truth is not False:
                self.read(branch.body)
            if truth is True:
                return
        self.read(otherwise)

    def _loop(self, node: nodes.For) -> None:
        over = self.kinds(node.iter)
        self._need(over, _CONST | _MESSAGES)
        if node.recursive:
            raise _NotUnderstood("a recursive loop")
        items: _Kinds = frozenset()
        if _Kind.CONST in over:
            items |= _CONST
        if _Kind.MESSAGES in over:
            items |= _MESSAGE
        self._bind(node.target, items)
        if node.test is not None:
            self._condition(node.test)
        self.read(node.body)
        self.read(node.else_)

    def _assign(self, target: nodes.Node, value: nodes.Node) -> None:
        if (
            isinstance(value, nodes.Call)
            and isinstance(value.node, nodes.Name)
            and value.node.name == "namespace"
        ):
            if (
                not isinstance(target, nodes.Name)
                or value.args
                or value.dyn_args
                or value.dyn_kwargs
            ):
                raise _NotUnderstood("namespace")
            for pair in value.kwargs:
                self._join(f"{target.name}.{pair.key}", self.kinds(pair.value))
            self._join(target.name, frozenset([_Kind.NAMESPACE]))
        else:
            self._bind(target, self.kinds(value))

    def _bind(self, target: nodes.Node, kinds: _Kinds) -> None:
        match target:
            case nodes.Name():
                self._join(target.name, kinds)
            case nodes.NSRef():
                self._join(f"{target.name}.{target.attr}", kinds)
            case nodes.Tuple():
                self._need(kinds, _CONST)
                for item in target.items:
                    self._bind(item, kinds)
            case _:
                raise _NotUnderstood(type(target).__name__)

    def _join(self, name: str, kinds: _Kinds) -> None:
        known = self._names.get(name, frozenset[_Kind]())
        if not kinds <= known:
            self._names[name] = known | kinds
            self.changed = True

    def _macro(self, node: nodes.Macro) -> None:
        if self._macros.setdefault(node.name, node) is not node:
            raise _NotUnderstood(f"two macros {node.name}")
        for parameter in node.args:
            self._join(parameter.name, _CONST)
        for value in node.defaults:
            self._need(self.kinds(value), _CONST)
        self.read(node.body)

    # Expressions

    def kinds(self, node: nodes.Node) -> _Kinds:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _CONST
            case nodes.Name():
                return self._name(node.name)
            case nodes.Getattr():
                return self._attribute(node)
            case nodes.Getitem():
                return self._item(node)
            case nodes.Call():
                return self._call(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Test():
                return self._test(node)
            case nodes.Compare():
                return self._compare(node)
            case nodes.And() | nodes.Or():
                return self.kinds(node.left) | self.kinds(node.right)
            case nodes.Not():
                self._condition(node.node)
                return _CONST
            case nodes.CondExpr():
                self._condition(node.test)
                other = _CONST if node.expr2 is None else self.kinds(node.expr2)
                return self.kinds(node.expr1) | other
            case nodes.Add() | nodes.Concat():
                parts = [self.kinds(part) for part in node.iter_child_nodes()]
                for part in parts:
                    self._need(part, _TEXT)
                return _CONST if all(part == _CONST for part in parts) else _MIXED
            case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Pair():
                return self._constant(*node.iter_child_nodes())
            case _:
                if isinstance(node, _ARITHMETIC):
                    return self._constant(*node.iter_child_nodes())
                raise _NotUnderstood(type(node).__name__)

    def _name(self, name: str) -> _Kinds:
        if (
            name in ("self", "caller", "varargs", "kwargs", "lipsum", "cycler", "joiner")
            or name in self._macros
        ):
            raise _NotUnderstood(name)
        return self._names.get(name, _CONST)

    def _attribute(self, node: nodes.Getattr) -> _Kinds:
        base = self.kinds(node.node)
        if isinstance(node.node, nodes.Name):
            if _Kind.NAMESPACE in base:
                self._need(base, frozenset([_Kind.NAMESPACE]))
                return self._names.get(f"{node.node.name}.{node.attr}", _CONST)
            if node.node.name == "loop" and node.attr in ("previtem", "nextitem"):
                return _CONST | _MESSAGE
        self._need(base, _CONST | _MESSAGE)
        if _Kind.MESSAGE in base and node.attr in dir(dict):
            raise _NotUnderstood(f"message.{node.attr}")
        return _field(base, node.attr)

    def _item(self, node: nodes.Getitem) -> _Kinds:
        base = self.kinds(node.node)
        self._need(base, frozenset([_Kind.CONST, _Kind.MESSAGES, _Kind.MESSAGE, _Kind.PIECES]))
        key = _const(node.arg)
        found: _Kinds = _CONST if _Kind.CONST in base else frozenset()
        if isinstance(node.arg, nodes.Slice):
            self._need(base, _CONST | _MESSAGES)
            self._constant(*node.arg.iter_child_nodes())
            return base
        self._constant(node.arg)
        if _Kind.MESSAGES in base:
            found |= _MESSAGE
        if _Kind.MESSAGE in base:
            if not isinstance(key, str):
                raise _NotUnderstood("a key of a message")
            found |= _field(_MESSAGE, key)
        if _Kind.PIECES in base:
            if key not in (0, -1):
                raise _NotUnderstood("a piece of a content")
            found |= _CONTENT
        return found

    def _call(self, node: nodes.Call) -> _Kinds:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _NotUnderstood("a call with * or **")
        match node.node:
            case nodes.Name(name="raise_exception"):
                for argument in node.args:
                    self.kinds(argument)
                return _CONST
            case nodes.Name(name="strftime_now"):
                form = _const(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
                if not isinstance(form, str):
                    raise _NotUnderstood("strftime_now")
                self.clocks.add(form)
                return _CONST
            case nodes.Name(name="range" | "dict"):
                return self._constant(*node.args, *(pair.value for pair in node.kwargs))
            case nodes.Name(name=name) if name in self._macros:
                return self._macro_call(self._macros[name], node)
            case nodes.Getattr():
                return self._method(node, node.node)
            case _:
                raise _NotUnderstood("a call")

    def _macro_call(self, macro: nodes.Macro, node: nodes.Call) -> _Kinds:
        names = [parameter.name for parameter in macro.args]
        if len(node.args) > len(names) or any(pair.key not in names for pair in node.kwargs):
            raise _NotUnderstood("arguments of a macro")
        given = [
            *zip(names, node.args, strict=False),
            *((pair.key, pair.value) for pair in node.kwargs),
        ]
        for name, value in given:
            self._join(name, self.kinds(value))
        return _MIXED

    def _method(self, node: nodes.Call, method: nodes.Getattr) -> _Kinds:
        base = self.kinds(method.node)
        if base == _CONST:
            return self._constant(*node.args, *(pair.value for pair in node.kwargs))
        if node.kwargs:
            raise _NotUnderstood("keywords of a method")
        if base <= _CONST | _MESSAGE and method.attr == "get" and 1 <= len(node.args) <= 2:
            key = _const(node.args[0])
            if not isinstance(key, str):
                raise _NotUnderstood("a key of a message")
            return _field(base, key) | (self.kinds(node.args[1]) if len(node.args) == 2 else _CONST)
        if base <= _TEXT and method.attr in ("strip", "lstrip", "rstrip"):
            return self._strip(base, node.args)
        self._need(base, _CONST | _CONTENT)
        if method.attr in ("startswith", "endswith") and len(node.args) == 1:
            self._literal(node.args[0])
            return _CONST
        if method.attr in ("split", "rsplit") and node.args and _const(node.args[0]):
            self._literal(node.args[0])
            self._constant(*node.args)
            return frozenset([_Kind.PIECES]) | (base & _CONST)
        if method.attr == "replace" and len(node.args) >= 2 and _const(node.args[0]):
            self._literal(node.args[0])
            self._constant(*node.args)
            return base
        raise _NotUnderstood(f"content.{method.attr}")

    def _filter(self, node: nodes.Filter) -> _Kinds:
        if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _NotUnderstood("a filter block")
        if node.name in _REFUSED_FILTERS:
            raise _NotUnderstood(f"filter {node.name}")
        base = self.kinds(node.node)
        self._constant(*node.args, *(pair.value for pair in node.kwargs))
        if base == _CONST:
            return base
        if node.kwargs:
            raise _NotUnderstood("keywords of a filter")
        if base <= _TEXT and node.name in ("trim", "string", "default", "d"):
            return (
                self._strip(base, node.args)
                if node.name == "trim"
                else base | (_CONST if node.args else base)
            )
        if (
            base <= _CONST | _CONTENT
            and node.name == "replace"
            and len(node.args) >= 2
            and _const(node.args[0])
        ):
            self._literal(node.args[0])
            return base
        if (
            base == _MESSAGES
            and node.name in ("selectattr", "rejectattr")
            and _const(node.args[0]) == "role"
        ):
            return base
        if base == _MESSAGES and node.name in ("list", "reverse") and not node.args:
            return base
        if base == _MESSAGES or base == frozenset([_Kind.PIECES]):
            if node.name in ("length", "count"):
                return _CONST
            if node.name in ("first", "last"):
                return _MESSAGE if base == _MESSAGES else _CONTENT
        raise _NotUnderstood(f"filter {node.name}")

    def _test(self, node: nodes.Test) -> _Kinds:
        base = self.kinds(node.node)
        if base == _CONST:
            self._constant(*node.args, *(pair.value for pair in node.kwargs))
        elif node.name not in _TYPE_TESTS:
            raise _NotUnderstood(f"test {node.name}")
        return _CONST

    def _compare(self, node: nodes.Compare) -> _Kinds:
        left = self.kinds(node.expr)
        sides = [self.kinds(operand.expr) for operand in node.ops]
        if left == _CONST and all(side == _CONST for side in sides):
            return _CONST
        if len(node.ops) != 1:
            raise _NotUnderstood("a chain of comparisons")
        operator, right_node, right = node.ops[0].op, node.ops[0].expr, sides[0]
        inside, equal = operator in ("in", "notin"), operator in ("eq", "ne")
        allowed = _CONST | _CONTENT
        if inside and left == _CONST and right <= allowed | _MESSAGE:
            self._literal(node.expr)
        elif (inside and left <= allowed and isinstance(right_node, nodes.List | nodes.Tuple)) or (
            equal and left <= allowed and isinstance(right_node, nodes.Const)
        ):
            self._literal(right_node)
        elif equal and right <= allowed and isinstance(node.expr, nodes.Const):
            self._literal(node.expr)
        else:
            raise _NotUnderstood(f"comparison {operator}")
        return _CONST

    # Helpers

    def _constant(self, *parts: nodes.Node) -> _Kinds:
        for part in parts:
            self._need(self.kinds(part), _CONST)
        return _CONST

    def _condition(self, node: nodes.Node) -> None:
        """Contents that meet the rules are not empty, so the truth of a value does not depend on
        them."""
        self.kinds(node)

    def _truth(self, node: nodes.Node) -> bool | None:
        """The result of a test of a content's type; None if it is unknown or tests something else.

        A tested variable may be unset, so only `message.content` itself counts.
        """
        match node:
            case nodes.Test(node=nodes.Getattr() | nodes.Getitem()) if node.name in _TYPE_TESTS:
                return _TYPE_TESTS[node.name] if self.kinds(node.node) == _CONTENT else None
            case nodes.Not():
                inner = self._truth(node.node)
                return None if inner is None else not inner
            case nodes.And() | nodes.Or():
                sides = (self._truth(node.left), self._truth(node.right))
                decisive = isinstance(node, nodes.Or)
                if decisive in sides:
                    return decisive
                return None if None in sides else not decisive
            case _:
                return None

    def _strip(self, base: _Kinds, arguments: Sequence[nodes.Node]) -> _Kinds:
        if not arguments:
            self.trims = True
        else:
            characters = _const(arguments[0])
            if not isinstance(characters, str):
                raise _NotUnderstood("the argument of strip")
            self.edges |= set(characters)
        return base

    def _literal(self, node: nodes.Node) -> None:
        """Records the strings that are searched for in contents. Other constants cannot be in a
        text."""
        if not isinstance(node, _LITERAL_NODES):
            raise _NotUnderstood("the string searched for")
        value = _const(node)
        for item in cast(Sequence[Any], value) if isinstance(value, tuple | list) else (value,):
            if isinstance(item, str) and item:  # a content is never empty
                self.literals.add(item)

    def _need(self, kinds: _Kinds, allowed: _Kinds) -> None:
        if not kinds <= allowed:
            raise _NotUnderstood(f"{kinds} where {allowed} is needed")


def _field(base: _Kinds, key: str) -> _Kinds:
    """The kind of a message's key. Messages in the fast path have only a role and a content."""
    content = _CONTENT if key == "content" and _Kind.MESSAGE in base else _CONST
    return content | (base & _CONST)


def _const(node: nodes.Node | None) -> Any:
    """The value of a literal, None for everything else."""
    if not isinstance(node, _LITERAL_NODES):
        return None
    try:
        return cast(nodes.Expr, node).as_const()
    except nodes.Impossible:
        return None
