"""The original ALFWorld (alfworld and TextWorld, extra `alfworld`) behind the interface of the
plain engine.

The text and the commands are the original's to the byte. Repeated computations are cached: a game
is translated once, constant templates are parsed once, and unchanged contexts are not deep-copied.

The original keeps its state in a C library and in `sys.argv`, so one lock serialises all calls;
play several games at once in worker processes.
"""

import copy
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from turnwise.envs.games.alfworld.engine import Frame
from turnwise.envs.games.alfworld.games import Game
from turnwise.envs.games.alfworld.world import DYNAMIC

_LOCK = threading.RLock()
_TASK_MARK = "UNKNOWN GOAL"
_KEPT_TRANSLATIONS = 16
# Every environment maps a copy of the C library that is never unmapped, so they are used again.
_IDLE: list[Any] = []


class TextWorldEngine:
    """Plays one game with the original engine."""

    def __init__(self, game: Game, *, task: str) -> None:
        self._game = game
        self._task = task
        self._env: Any = None
        self._facts: list[Any] = []

    def reset(self) -> Frame:
        """The opening frame."""
        with _LOCK:
            if self._env is None:
                self._env = _IDLE.pop() if _IDLE else _make_env()
                self._env.load({**_logic(), "pddl_problem": self._game.pddl_problem})
            # The rules do not depend on the task, so the grammar is the same for all games and
            # parsed once.
            return self._frame(self._env.reset(), task=self._task)

    def step(self, command: str) -> Frame:
        """The frame after `command`."""
        if self._env is None:
            raise RuntimeError("step needs a running game; call reset first")
        with _LOCK:
            state, _, _ = self._env.step(command)
            return self._frame(state)

    def state_key(self) -> str:
        """Names the state; equal to the plain engine's key for the same state."""
        facts = (
            (fact.name, *(argument.name for argument in fact.arguments)) for fact in self._facts
        )
        state = "\n".join(sorted(" ".join(fact) for fact in facts if fact[0] in DYNAMIC))
        return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        """Returns the original environment for reuse by the next game."""
        with _LOCK:
            if self._env is not None:
                _IDLE.append(self._env)
                self._env = None

    def _frame(self, state: Any, *, task: str | None = None) -> Frame:
        self._facts = state["_facts"]
        text = str(state.feedback)
        if task is not None:
            text = text.replace(_TASK_MARK, task)
        return Frame(
            text=text, commands=tuple(state["admissible_commands"]), won=bool(state["won"])
        )


def require_original() -> None:
    """Raises ImportError, naming the extra, where the original is not installed."""
    if (
        importlib.util.find_spec("alfworld") is None
        or importlib.util.find_spec("textworld") is None
    ):
        raise ImportError(
            "engine: textworld needs alfworld and textworld, which are not installed: pip install "
            "'turnwise[alfworld]' "
            "(it compiles two packages, so it needs gcc, g++ and cmake), or use engine: plain"
        )


@cache
def _modules() -> tuple[Any, Any, Any]:
    """(textworld.envs, alfworld's wrappers, TextWorld's parsers made quick), or an ImportError that
    names the extra."""
    require_original()
    envs = importlib.import_module("textworld.envs")
    wrappers = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    logic = importlib.import_module("textworld.envs.pddl.logic")
    _quicken(logic)
    return envs, wrappers, logic


def _make_env() -> Any:
    envs, wrappers, _ = _modules()
    textworld = importlib.import_module("textworld")
    infos = textworld.EnvInfos(admissible_commands=True, won=True)
    return wrappers.AlfredDemangler(envs.PddlEnv(infos), shuffle=False)


@cache
def _logic() -> Mapping[str, str]:
    """The rules and the grammar that alfworld ships."""
    data = Path(str(importlib.import_module("alfworld").__file__)).parent / "data"
    return {
        "pddl_domain": (data / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": (data / "alfred.twl2").read_text(encoding="utf-8"),
    }


def _quicken(logic: Any) -> None:
    """Replaces the functions that take most of a step, by ones that return the same values."""
    textgen: Any = importlib.import_module("textworld.envs.pddl.textgen")
    rules: Any = importlib.import_module("textworld.logic")
    parse_symbols, parse_game = textgen._parse_and_convert, logic._parse_and_convert
    parse_query, translate = rules.Rule.parse_conjunctive_query, logic.fast_downward.pddl2sas

    @cache
    def symbols(text: str, rule_name: str) -> Any:
        return parse_symbols(text, rule_name=rule_name)

    def fresh_symbols(text: str, *, rule_name: str, **_: Any) -> Any:
        return copy.deepcopy(symbols(text, rule_name))  # derivations write into their symbols

    def copy_context(context: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **context,
            "variables": dict(context["variables"]),
            "mapping": dict(context["mapping"]),
        }

    @lru_cache(maxsize=_KEPT_TRANSLATIONS)
    def translated(domain: str, problem: str) -> Any:
        arguments = list(sys.argv)
        try:
            return translate(domain, problem)
        finally:
            sys.argv[:] = arguments

    def translate_once(domain: str, problem: str, *_: Any, **__: Any) -> Any:
        # The optimised form serves only to plan, which never happens here; the plain form would do
        # for it too.
        return translated(domain, problem)

    textgen._parse_and_convert = fresh_symbols
    textgen.copy_context = copy_context
    logic._parse_and_convert = lru_cache(maxsize=8)(parse_game)
    logic.fast_downward.pddl2sas = translate_once
    rules.Rule.parse_conjunctive_query = cache(parse_query)
