"""Reads the PDDL problems that ALFWorld's games are written in: objects, initial facts, goal."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Fact = tuple[str, ...]
Expression = str | list["Expression"]

_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")
_MAX_DEPTH = 64
_MAX_GROUNDINGS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A PDDL problem in lower case, as PDDL's names know no case.

    Example:
        >>> problem = parse_problem('''(define (problem p) (:domain alfred)
        ...     (:objects Apple1 - object) (:init (isHot Apple1)) (:goal (and (isHot Apple1))))''')
        >>> problem.types, sorted(problem.init)
        ({'apple1': 'object'}, [('ishot', 'apple1')])
    """

    types: Mapping[str, str]
    """Declared object -> its type."""
    init: frozenset[Fact]
    """Facts that hold at the start: (predicate, argument, ...)."""
    goal: Expression
    """The goal as nested lists of words."""


def parse_problem(text: str) -> Problem:
    """The problem that `text` defines. Raises ValueError where it is not a PDDL problem."""
    tree = _parse(text)
    if not isinstance(tree, list) or not tree or tree[0] != "define":
        raise ValueError(f"a PDDL problem starts with (define ...), got {text[:60]!r}")
    sections: dict[str, list[Expression]] = {}
    for part in tree[1:]:
        if isinstance(part, list) and part and isinstance(part[0], str):
            sections[part[0]] = part[1:]
    for name in (":objects", ":init", ":goal"):
        if name not in sections:
            raise ValueError(
                f"a PDDL problem has a section ({name} ...), found only {sorted(sections)}"
            )
    init = frozenset(_fact(item) for item in sections[":init"] if not _is_number(item))
    return Problem(
        types=_typed_list(sections[":objects"]), init=init, goal=["and", *sections[":goal"]]
    )


def ground_goal(
    problem: Problem, *, dynamic: frozenset[str]
) -> tuple[tuple[frozenset[Fact], ...], ...]:
    """The goal as parts that must all hold, each a list of alternatives, each a set of facts that
    may change.

    Facts that never change are decided here once, so that checking the goal after a step is a few
    subset tests.

    Example:
        >>> problem = parse_problem('''(define (problem p) (:objects a b - object) (:init (red a))
        ...     (:goal (exists (?o - object) (and (red ?o) (held ?o)))))''')
        >>> ground_goal(problem, dynamic=frozenset({"held"}))
        ((frozenset({('held', 'a')}),),)
    """
    parts: list[tuple[frozenset[Fact], ...]] = []
    for part in _conjuncts(problem.goal):
        query = _Query({}, [], [])
        query.read(part)
        parts.append(tuple(dict.fromkeys(query.groundings(problem, dynamic))))
    return tuple(parts)


@dataclass(slots=True)
class _Query:
    """A conjunction of atoms and inequalities under existential quantifiers."""

    variables: dict[str, str]
    atoms: list[Fact]
    unequal: list[tuple[str, str]]

    def read(self, expression: Expression) -> None:
        head = expression[0] if isinstance(expression, list) and expression else expression
        if isinstance(expression, str) or not isinstance(head, str):
            raise ValueError(
                f"a goal is made of (and ...), (exists ...) and facts, got {expression!r}"
            )
        if head == "and":
            for child in expression[1:]:
                self.read(child)
        elif head == "exists" and len(expression) == 3 and isinstance(expression[1], list):
            self.variables.update(_typed_list(expression[1]))
            self.read(expression[2])
        elif head == "not" and len(expression) == 2 and _is_equality(expression[1]):
            _, left, right = _fact(expression[1])
            self.unequal.append((left, right))
        elif head in ("not", "or", "forall", "imply", "when"):
            raise ValueError(
                f"the plain engine's goals know no ({head} ...); play this game with engine: "
                "textworld"
            )
        else:
            self.atoms.append(_fact(expression))

    def groundings(self, problem: Problem, dynamic: frozenset[str]) -> Iterator[frozenset[Fact]]:
        bindings: list[dict[str, str]] = [{}]
        for atom in self.atoms:
            if atom[0] not in dynamic:
                facts = [
                    fact for fact in problem.init if fact[0] == atom[0] and len(fact) == len(atom)
                ]
                bindings = [
                    new
                    for old in bindings
                    for fact in sorted(facts)
                    if (new := _match(atom, fact, old))
                ]
                _limit(len(bindings))
        for binding in bindings:
            free = [name for name in self.variables if name not in binding]
            choices = [
                [o for o, kind in problem.types.items() if kind == self.variables[name]]
                for name in free
            ]
            for number, values in enumerate(product(*choices)):
                _limit(number)
                full = {**binding, **dict(zip(free, values, strict=True))}
                if all(full.get(a, a) != full.get(b, b) for a, b in self.unequal):
                    yield frozenset(
                        (atom[0], *(full.get(arg, arg) for arg in atom[1:]))
                        for atom in self.atoms
                        if atom[0] in dynamic
                    )


def _match(atom: Fact, fact: Fact, binding: Mapping[str, str]) -> dict[str, str] | None:
    new = dict(binding)
    for argument, value in zip(atom[1:], fact[1:], strict=True):
        if argument.startswith("?"):
            if new.setdefault(argument, value) != value:
                return None
        elif argument != value:
            return None
    return new


def _limit(count: int) -> None:
    if count > _MAX_GROUNDINGS:
        raise ValueError(
            f"a goal has at most {_MAX_GROUNDINGS} ways to be met, this one has more: name its "
            "types"
        )


def _conjuncts(goal: Expression) -> Iterator[Expression]:
    if isinstance(goal, list) and goal and goal[0] == "and":
        for child in goal[1:]:
            yield from _conjuncts(child)
    else:
        yield goal


def _is_equality(expression: Expression) -> bool:
    return isinstance(expression, list) and len(expression) == 3 and expression[0] == "="


def _is_number(expression: Expression) -> bool:
    """True for (= (total-cost) 0) and its like, which say nothing about the world."""
    return isinstance(expression, list) and bool(expression) and expression[0] == "="


def _fact(expression: Expression) -> Fact:
    if isinstance(expression, list) and expression:
        words = tuple(word for word in expression if isinstance(word, str))
        if len(words) == len(expression):
            return words
    raise ValueError(f"a fact is (predicate argument ...), got {expression!r}")


def _typed_list(words: Iterable[Expression]) -> dict[str, str]:
    types: dict[str, str] = {}
    pending: list[str] = []
    items: Sequence[Expression] = list(words)
    index = 0
    while index < len(items):
        word = items[index]
        if not isinstance(word, str):
            raise ValueError(f"a typed list is made of names and '- type', got {word!r}")
        if word == "-":
            kind = items[index + 1] if index + 1 < len(items) else None
            if not isinstance(kind, str):
                raise ValueError(f"'-' in a typed list is followed by a type's name, got {kind!r}")
            types.update(dict.fromkeys(pending, kind))
            pending = []
            index += 2
        else:
            pending.append(word)
            index += 1
    types.update(dict.fromkeys(pending, "object"))
    return types


def _parse(text: str) -> Expression:
    stack: list[list[Expression]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            stack.append([])
            if len(stack) > _MAX_DEPTH:
                raise ValueError(f"PDDL nests at most {_MAX_DEPTH} parentheses deep")
        elif token == ")":
            if len(stack) == 1:
                raise ValueError("PDDL closes a parenthesis that it never opened")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) > 1:
        raise ValueError(f"PDDL leaves {len(stack) - 1} parentheses open")
    if len(stack[0]) != 1:
        raise ValueError(f"a PDDL problem is one expression, got {len(stack[0])}")
    return stack[0][0]
