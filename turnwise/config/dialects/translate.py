"""Translates other projects' configs into turnwise's tree: every key is translated, or refused with
the reason.

Layers (a recipe, a file, the command line) are added one after the other; a later layer wins.
Within a layer, two spellings of one setting must agree. Keys that must be read together (`facts`)
are kept over all layers and combined again in each layer that changes them.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast, get_args

from turnwise.config.dialects.combinations import COMBINATIONS
from turnwise.config.dialects.keys import PASSED_ON, RULES, SHORT_FLAG_SECTIONS, VERL_ROOTS
from turnwise.config.dialects.rules import AnyRule, Differs, Fact, Moot, No, Only, Rule
from turnwise.config.schema import GROUP_RELATIVE, WITH_CRITIC, AlgoConfig, Config
from turnwise.config.tree import (
    Tree,
    alike,
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
"""Settings of `env` that are specific to one environment."""

_OF_ANY_ALGORITHM = {"name", "entropy_coef", "tis_cap"}
_OF_ONE_ALGORITHM = frozenset(
    {f"algo.{name}" for name in AlgoConfig.model_fields if name not in _OF_ANY_ALGORITHM}
    | {"model.critic", "train.critic_warmup"}
)
"""Settings that are specific to one algorithm; others refuse them."""
_OF_CRITICS = frozenset(
    {"algo.lam", "algo.value_clip", "algo.value_coef", "model.critic", "train.critic_warmup"}
)
"""The settings among them that every algorithm with a critic accepts."""
_PLACES = frozenset(
    f"trainer.{name}" for name in ("default_local_dir", "experiment_name", "project_name")
)
"""Names of folders and runs: no result depends on them."""
_MEANT = {
    "algo": "algo.name",
    "algorithm": "algo.name",
    "env": "env.name",
    "model": "model.path",
    "steps": "train.steps",
}
"""Suggestions for a single value given in place of a section, or for a bare word."""
GROUP_SIZE = 8
"""Episodes per group if an algorithm needs groups and the recipe has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """A key of another project that was taken without setting what it sets there."""

    value: Any
    why: str
    moot: bool
    """No result depends on it here."""


class Translator:
    """Collects layers into one tree with turnwise's names.

    Example:
        >>> translator = Translator()
        >>> translator.add({"train_cfgs": {"max_turn": 3, "bi_level_gae": True}, "seed": 7},
        ...     origin="a.yaml")
        >>> translator.finish()
        {'train': {'max_turn': 3}, 'seed': 7, 'algo': {'name': 'bi_level_gae'}}
    """

    def __init__(self, *, backend: str | None = None) -> None:
        self.problems: list[str] = []
        self.spelled: dict[str, str] = {}
        """By our path: the key that set it, as it was written."""
        self.notes: dict[str, Noted] = {}
        """By key as it was written."""
        self._backend = backend or "native"
        self._tree: Tree = {}
        self._facts: Tree = {}
        self._given: Tree = {} if backend is None else {"backend": backend}
        """Every key of another project with its value, for combinations; and the backend, where one
        was named."""
        self._shared: Tree = {}
        """Settings that apply to every environment, by path below `env`."""
        self._layer: Tree = {}
        self._layer_spelled: dict[str, str] = {}
        self._layer_facts: Tree = {}
        self._of_recipes: set[str] = set()
        """turnwise's paths whose value comes from a recipe."""
        self._origin = ""

    def add(self, layer: Mapping[str, Any], *, origin: str, recipe: bool = False) -> None:
        """Adds a layer that overrides the earlier ones. Invalid entries are recorded in `problems`.

        `recipe`: the layer comes with turnwise. Its settings for one algorithm are dropped if the
        user chooses another.
        """
        self._origin = origin
        self._layer, self._layer_spelled, self._layer_facts = {}, {}, {}
        for key, value in layer.items():
            self._walk(str(key), value)
        self._combine()
        named, before = get_path(self._layer, "env.name"), get_path(self._tree, "env.name")
        if named is not None and before not in (
            None,
            named,
        ):  # settings of another environment do not apply
            own = {key: value for key, value in self._tree["env"].items() if key not in _OF_ONE_ENV}
            self._tree = {**self._tree, "env": own}
        self._one_turn_limit()
        if has_path(self._layer, "train.steps") and not has_path(self._layer, "data.epochs"):
            self._tree = _without(self._tree, {"data.epochs"})  # two ends of a run: the later wins
        self._switch_algorithm()
        self._tree = merge(self._tree, self._layer)
        self.spelled |= self._layer_spelled
        paths = set(_leaves(self._layer))
        self._of_recipes = self._of_recipes | paths if recipe else self._of_recipes - paths

    def finish(self) -> Tree:
        """The tree of all layers; settings for every environment are copied to all tags."""
        tree = merge(self._tree, {})
        turns = get_path(tree, "env.max_turn")
        if isinstance(turns, int):  # one limit: a resolved config that says two is not read again
            set_path(tree, "train.max_turn", turns)
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

    def _one_turn_limit(self) -> None:
        """env.max_turn and train.max_turn are one limit: a layer that sets either replaces both
        from earlier layers."""
        ours, whole = (get_path(self._layer, path) for path in ("env.max_turn", "train.max_turn"))
        if ours is not None and whole is not None and ours != whole:
            self._problem(
                "env.max_turn", f"{ours!r} contradicts train.max_turn = {whole!r}; keep one"
            )
        if whole is None or has_path(self._layer, "env.max_turn"):
            return
        self._tree = merge(self._tree, {})
        envs = self._tree.get("envs")
        entries = list(cast(Tree, envs).values()) if is_tree(envs) else []
        for entry in (self._tree.get("env"), *entries):
            if isinstance(entry, dict):
                cast(Tree, entry).pop("max_turn", None)

    def _switch_algorithm(self) -> None:
        """If this layer names another algorithm, drops the recipes' settings for theirs. Enlarges
        groups of one if the new algorithm compares within groups."""
        name, before = get_path(self._layer, "algo.name"), get_path(self._tree, "algo.name")
        if name is None or before in (None, name):
            return
        both_have_critics = {name, before} <= set(WITH_CRITIC)
        dropped = self._of_recipes & _OF_ONE_ALGORITHM
        dropped -= _OF_CRITICS if both_have_critics else set()
        self._tree = _without(self._tree, dropped)
        size = "rollout.train.group_size"
        if name in GROUP_RELATIVE and size in self._of_recipes and get_path(self._tree, size) == 1:
            count = get_path(self._tree, "rollout.train.env_groups") or 0
            groups = {"env_groups": max(count // GROUP_SIZE, 1), "group_size": GROUP_SIZE}
            self._tree = merge(self._tree, {"rollout": {"train": groups}})

    def _walk(self, path: str, value: Any) -> None:
        if (rule := RULES.get(path)) is not None:
            self._apply(path, rule, value)
        elif path == "envs" and is_tree(value):
            self._put_envs(value, path)
        elif _is_section(path) and not is_tree(value):
            if value is not None:
                self._problem(path, f"is a section with its own keys, got {value!r}{_meant(path)}")
        elif is_tree(value) and (
            _is_section(path) or any(key.startswith(f"{path}.") for key in RULES)
        ):
            for key, inner in value.items():
                self._walk(f"{path}.{key}", inner)
        elif path in known_fields():
            self._put(path, value, path)
        elif (short := _short_flag(path)) is not None:
            self._apply(path, RULES[short], value, fact=short)
        else:
            self._unknown(path, value)

    def _apply(self, path: str, rule: AnyRule, value: Any, *, fact: str | None = None) -> None:
        of_verl = self._backend == "verl" and path.split(".")[0] in VERL_ROOTS
        if of_verl and (path in PASSED_ON or isinstance(rule, Only | No)):
            self._pass_to_verl(path, value)
            return
        if value is None and not _takes_none(rule):
            return  # their way to say that it is not set
        if isinstance(rule, str | Rule | Fact) and self._unset(value):
            if path in _PLACES:
                why = f"a variable in it is not set: {target_of(path)} keeps its default"
                self.notes[path] = Noted(value=value, why=why, moot=False)
                self._given[path] = value
            else:
                self._problem(path, f"{value}: a variable in it is not set")
            return
        self._given[path] = value
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
                if not rule.accepts(value):
                    self._problem(path, f"{value!r} means nothing here: {rule.why}. Remove the key")
            case Moot() | Differs():
                moot = isinstance(rule, Moot)
                self.notes[path] = Noted(value=value, why=rule.why, moot=moot)
            case No():
                self._problem(path, f"means nothing here: {rule.why}")

    def _unset(self, value: Any) -> bool:
        """True where a shell script left a variable in the value."""
        return self._origin.endswith((".sh", ".bash")) and isinstance(value, str) and "$" in value

    def _put(self, target: str, value: Any, source: str) -> None:
        """Sets a path in this layer. Two spellings in one layer must agree."""
        if has_path(self._layer, target) and (old := get_path(self._layer, target)) != value:
            before = self._layer_spelled.get(target, target)
            self._problem(
                source, f"{value!r} contradicts {before} = {old!r}: both set {target}; keep one"
            )
            return
        set_path(self._layer, target, value)
        self._layer_spelled[target] = source

    def _put_envs(self, envs: Mapping[str, Any], source: str) -> None:
        """Adds entries of `envs`. Tags may contain dots, so dotted paths cannot be used here."""
        present = self._layer.get("envs", {})
        for tag, entry in envs.items():
            old = present.get(tag, {})
            for key in entry if is_tree(entry) and is_tree(old) else ():
                if key in old and old[key] != entry[key]:
                    self._problem(
                        source,
                        f"envs.{tag}.{key} is set to {old[key]!r} and to {entry[key]!r}; keep one",
                    )
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
        if path in _MEANT:
            self._problem(path, f"unknown key{_meant(path)}")
            return
        why = "unknown key"
        if root in VERL_ROOTS and root not in Config.model_fields:
            why = (
                f"a key of verl, not supported by backend {self._backend!r}; set backend: "
                "verl, or remove it"
            )
        elif root in VERL_ROOTS:
            why = f"unknown key; {root} of verl means nothing to backend {self._backend!r}"
        self._problem(path, why + did_you_mean(path))

    def _pass_to_verl(self, path: str, value: Any) -> None:
        if is_tree(value) and value:
            for key, inner in value.items():
                self._pass_to_verl(f"{path}.{key}", inner)
            return
        self._layer.setdefault("verl", {})[path] = value

    def _problem(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text} ({self._origin})")

    def _combine(self) -> None:
        """Turns facts into settings, for each combination that this layer changes."""
        self._facts |= self._layer_facts
        for keys, combine in COMBINATIONS:
            facts = {key: self._facts[key] for key in keys if key in self._facts}
            touched = [key for key in keys if key in self._layer_facts]
            asked = any(has_path(self._layer, key[1:]) for key in keys if key.startswith("="))
            if not facts or not (touched or asked):
                continue
            beside = (key[1:] for key in keys if key.startswith("?"))
            facts |= {key: self._given[key] for key in beside if key in self._given}
            source = (touched or list(facts))[0]
            seen = merge(self._tree, self._layer)
            try:
                settings = combine(facts, seen, self._note)
            except ValueError as error:
                for line in str(error).splitlines():
                    self._problem(source, line)
                continue
            envs = settings.pop("envs", {})
            if not touched:  # what earlier layers set, they set
                envs = {tag: env for tag, env in envs.items() if tag not in self._tree["envs"]}
            self._put_envs(envs, source)
            for target, value in settings.items():
                self._put(target, value, source)
                if target.startswith(("env.format.", "env.shaping.")):
                    self._shared[target.removeprefix("env.")] = value

    def _note(self, key: str, why: str, *, moot: bool = False) -> None:
        self.notes[key] = Noted(value=self._given.get(key, {}), why=why, moot=moot)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all values.

    Example:
        >>> list(_leaves({"train": {"lr": 1, "steps": 2}, "seed": 3}))
        ['train.lr', 'train.steps', 'seed']
    """
    for key, value in tree.items():
        if is_tree(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _without(tree: Mapping[str, Any], paths: Set[str], prefix: str = "") -> Tree:
    """The tree without these dotted paths."""
    return {
        key: _without(value, paths, f"{prefix}{key}.") if is_tree(value) else value
        for key, value in tree.items()
        if f"{prefix}{key}" not in paths
    }


def did_you_mean(path: str) -> str:
    """The hint behind an unknown key: one of ours that is like it, or another project's whose last
    part is nearly the same. In one of our sections, our name of that.

    Example:
        >>> did_you_mean("train.learning_rat"), did_you_mean("trainer.total_epoch")
        ('. Did you mean train.lr?', '. Did you mean trainer.total_epochs?')
        >>> did_you_mean("data.train_fils"), did_you_mean("data.train_file_names")
        ('. Did you mean data.train_files?', '')
    """
    leaf = path.rpartition(".")[2]
    theirs = [
        key
        for key, rule in RULES.items()
        if not isinstance(rule, No) and alike(leaf, key.rpartition(".")[2]) >= 0.85
    ]
    guess = nearest(path, [*known_fields(), *theirs])
    if guess and path.split(".")[0] in Config.model_fields:
        guess = target_of(guess) or guess
    return f". Did you mean {guess}?" if guess else ""


def _takes_none(rule: AnyRule) -> bool:
    """True where one of our settings behind the rule can be null."""
    targets = (rule,) if isinstance(rule, str) else rule.to if isinstance(rule, Rule) else ()
    fields = (known_fields().get(target) for target in targets)
    return any(field is not None and NoneType in get_args(field.annotation) for field in fields)


def _meant(path: str) -> str:
    return f". Did you mean {_MEANT[path]}?" if path in _MEANT else ""


def _is_section(path: str) -> bool:
    field = known_fields().get(path)
    return field is not None and section_of(field) is not None


def _short_flag(path: str) -> str | None:
    """The full key of a bare name such as `max_turn`."""
    found = (f"{section}.{path}" for section in SHORT_FLAG_SECTIONS)
    return next((key for key in found if key in RULES), None)


def target_of(path: str) -> str | None:
    """turnwise's name for another project's key, to read a value back; None if there is none.

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
