"""Other projects' configs in our tree: every key is translated, or refused with the reason.

Layers (a recipe, a file, the command line) are added one after the other, and a later one wins. Within a layer two
spellings of one setting must agree. Keys that mean something only together (`facts`) are kept over all layers and
combined anew in each layer that touches them.
"""

from collections.abc import Mapping
from typing import Any, cast

from turnwise.config.dialects.combinations import COMBINATIONS
from turnwise.config.dialects.keys import RULES, SHORT_FLAG_SECTIONS, VERL_ROOTS, AnyRule, Fact, No, Only, Rule
from turnwise.config.schema import Config
from turnwise.config.tree import (
    Tree,
    default_at,
    get_path,
    has_path,
    is_tree,
    known_fields,
    merge,
    nearest,
    section_of,
    set_path,
)

_OF_ONE_ENV = ("options", "reset_options", "system_prompt")
"""Settings of `env` that mean something to the environment that they were written for, and to no other."""


class Translator:
    """Collects layers into one tree of our own names.

    Example:
        >>> translator = Translator()
        >>> translator.add({"train_cfgs": {"max_turn": 3, "bi_level_gae": True}, "seed": 7}, origin="a.yaml")
        >>> translator.finish()
        {'train': {'max_turn': 3}, 'seed': 7, 'algo': {'name': 'bi_level_gae'}}
    """

    def __init__(self, *, backend: str = "native") -> None:
        self.problems: list[str] = []
        self.spelled: dict[str, str] = {}
        """By our path: the key that set it, as it was written."""
        self._backend = backend
        self._tree: Tree = {}
        self._facts: Tree = {}
        self._shared: Tree = {}
        """Settings that hold for every environment, by path below `env`."""
        self._layer: Tree = {}
        self._layer_spelled: dict[str, str] = {}
        self._layer_facts: Tree = {}
        self._origin = ""

    def add(self, layer: Mapping[str, Any], *, origin: str) -> None:
        """Adds a layer that wins over those before it. What cannot be used is noted in `problems`."""
        self._origin = origin
        self._layer, self._layer_spelled, self._layer_facts = {}, {}, {}
        for key, value in layer.items():
            self._walk(str(key), value)
        self._combine()
        named, before = get_path(self._layer, "env.name"), get_path(self._tree, "env.name")
        if named is not None and before not in (None, named):  # what was said of another environment is not of this
            own = {key: value for key, value in self._tree["env"].items() if key not in _OF_ONE_ENV}
            self._tree = {**self._tree, "env": own}
        self._tree = merge(self._tree, self._layer)
        self.spelled |= self._layer_spelled

    def finish(self) -> Tree:
        """The tree of all layers, with settings for every environment spread over the tags."""
        tree = merge(self._tree, {})
        name = get_path(tree, "env.name") or default_at("env.name")
        envs = tree.get("envs", {})
        if not self._shared or not is_tree(envs):
            return tree
        for split in ("train", "val"):
            tags = get_path(tree, f"rollout.{split}.tags")
            for tag in cast("list[Any]", tags) if isinstance(tags, list | tuple) else ():
                if isinstance(tag, str) and tag != name:
                    envs.setdefault(tag, {"name": tag})
        for entry in envs.values():
            for path, value in self._shared.items() if is_tree(entry) else ():
                if not has_path(entry, path):
                    set_path(entry, path, value)
        return tree | ({"envs": envs} if envs else {})

    def _walk(self, path: str, value: Any) -> None:
        if (rule := RULES.get(path)) is not None:
            self._apply(path, rule, value)
        elif path == "envs" and is_tree(value):
            self._put_envs(value, path)
        elif _is_section(path) and not is_tree(value):
            if value is not None:
                self._problem(path, f"is a section with keys of its own, got {value!r}")
        elif is_tree(value) and (_is_section(path) or any(key.startswith(f"{path}.") for key in RULES)):
            for key, inner in value.items():
                self._walk(f"{path}.{key}", inner)
        elif path in known_fields():
            self._put(path, value, path)
        elif (short := _short_flag(path)) is not None:
            self._apply(path, RULES[short], value, fact=short)
        else:
            self._unknown(path, value)

    def _apply(self, path: str, rule: AnyRule, value: Any, *, fact: str | None = None) -> None:
        match rule:
            case str():
                self._put(rule, value, path)
            case Rule():
                try:
                    converted = rule.convert(value)
                except ValueError as error:
                    self._problem(path, str(error))
                    return
                for target in rule.to:
                    self._put(target, converted, path)
                    if rule.every_env:
                        self._shared[target.removeprefix("env.")] = converted
            case Fact():
                self._layer_facts[fact or path] = value
            case Only():
                if self._backend == "verl" and path.split(".")[0] in VERL_ROOTS:
                    self._pass_to_verl(path, value)
                elif value != rule.value:
                    self._problem(path, f"{value!r} means nothing here: {rule.why}. Remove the key")
            case No():
                if self._backend == "verl" and path.split(".")[0] in VERL_ROOTS:
                    self._pass_to_verl(path, value)
                else:
                    self._problem(path, f"means nothing here: {rule.why}")

    def _put(self, target: str, value: Any, source: str) -> None:
        """Sets one of our paths in this layer. Two spellings in one layer must agree."""
        if has_path(self._layer, target) and (old := get_path(self._layer, target)) != value:
            before = self._layer_spelled.get(target, target)
            self._problem(source, f"{value!r} contradicts {before} = {old!r}: both set {target}; keep one")
            return
        set_path(self._layer, target, value)
        self._layer_spelled[target] = source

    def _put_envs(self, envs: Mapping[str, Any], source: str) -> None:
        """Adds entries of `envs`. Their tags may hold dots, so they have no dotted path here."""
        present = self._layer.get("envs", {})
        for tag, entry in envs.items():
            old = present.get(tag, {})
            for key in entry if is_tree(entry) and is_tree(old) else ():
                if key in old and old[key] != entry[key]:
                    self._problem(source, f"envs.{tag}.{key} is set to {old[key]!r} and to {entry[key]!r}; keep one")
        if envs:
            self._layer = merge(self._layer, {"envs": envs})

    def _unknown(self, path: str, value: Any) -> None:
        root = path.split(".")[0]
        if root in VERL_ROOTS and self._backend == "verl":
            self._pass_to_verl(path, value)
            return
        if is_tree(value) and len(value) == 1:
            ((key, inner),) = value.items()
            self._unknown(f"{path}.{key}", inner)
            return
        why = "unknown key"
        if root in VERL_ROOTS and root not in Config.model_fields:
            why = f"a key of verl, which means nothing to backend {self._backend!r}; set backend: verl, or remove it"
        candidates = [*known_fields(), *(key for key, rule in RULES.items() if not isinstance(rule, No))]
        guess = nearest(path, candidates)
        if guess and root in Config.model_fields:
            guess = target_of(guess) or guess
        self._problem(path, why + (f". Did you mean {guess}?" if guess else ""))

    def _pass_to_verl(self, path: str, value: Any) -> None:
        if is_tree(value) and value:
            for key, inner in value.items():
                self._pass_to_verl(f"{path}.{key}", inner)
            return
        self._layer.setdefault("verl", {})[path] = value

    def _problem(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text} ({self._origin})")

    def _combine(self) -> None:
        """Turns facts into settings, for each combination that this layer touches."""
        self._facts |= self._layer_facts
        for keys, combine in COMBINATIONS:
            touched = [key for key in keys if key in self._layer_facts]
            if not touched:
                continue
            facts = {key: self._facts[key] for key in keys if key in self._facts}
            seen = merge(self._tree, self._layer)
            try:
                settings = combine(facts, seen)
            except ValueError as error:
                self._problem(touched[0], str(error))
                continue
            self._put_envs(settings.pop("envs", {}), touched[0])
            for target, value in settings.items():
                self._put(target, value, touched[0])
                if target.startswith("env."):
                    self._shared[target.removeprefix("env.")] = value


def _is_section(path: str) -> bool:
    field = known_fields().get(path)
    return field is not None and section_of(field) is not None


def _short_flag(path: str) -> str | None:
    """The full key that a bare name such as `max_turn` stands for."""
    found = (f"{section}.{path}" for section in SHORT_FLAG_SECTIONS)
    return next((key for key in found if key in RULES), None)


def target_of(path: str) -> str | None:
    """Our name behind another project's key, to read a value back; None where there is none.

    Example:
        >>> target_of("training.num_epochs"), target_of("agent.agent_length")
        ('train.steps', None)
    """
    match RULES.get(path):
        case str() as target:
            return target
        case Rule() as rule:
            return rule.to[0]
        case Fact() as fact:
            return fact.reads or None
        case _:
            return None
