"""Loading: files, recipes, overrides, and what is said about a config that cannot be used."""

import json
from operator import attrgetter
from pathlib import Path

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config import (
    Config,
    ConfigError,
    ConfigStore,
    list_recipes,
    load_config,
    parse_overrides,
    show_config,
)
from turnwise.config.dialects.keys import RULES
from turnwise.config.schema import EnvConfig, LogConfig
from turnwise.config.tree import iter_fields, known_fields, section_of, set_path
from turnwise.config.yaml_io import dump_yaml, parse_yaml
from turnwise.envs.games.simple_game import SimpleGameEnvironment


def problems_of(source: object, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)  # type: ignore[arg-type]
    return caught.value.problems


def test_a_resolved_config_with_a_turn_limit_is_read_again(tmp_path: Path) -> None:
    """Run directories hold resolved configs, which name the limit twice"""
    for config in (
        load_config({"env": {"name": "simple_game", "max_turn": 3}}),
        load_config("frozen_lake", ["env.max_turn=2"]),
    ):
        path = tmp_path / "config.yaml"
        path.write_text(show_config(config))
        assert load_config(path) == config
        assert config.train.max_turn == config.env.max_turn


def test_nothing_given_is_the_schema() -> None:
    assert load_config() == Config() == load_config({}, [])


@pytest.mark.parametrize(
    "words",
    [
        ["--train.max_turn", "3"],
        ["--train.max_turn=3"],
        ["train.max_turn=3"],
        ["train.max_turn=9", "train.max_turn=3"],
    ],
)
def test_both_forms_of_an_override(words: list[str]) -> None:
    assert load_config(None, words).train.max_turn == 3


def test_override_values_are_yaml() -> None:
    config = load_config(
        None,
        [
            *(
                "--train.lr",
                "5e-7",
                "rollout.train.tags=[FrozenLake, Bandit]",
                "--env.format.format_penalty",
                "-0.25",
            ),
            *(
                "eval.before=false",
                "log.name=null",
                "env.options={size: 3, name: 'no'}",
                "envs.lake.name=frozen_lake",
            ),
        ],
    )
    assert config.train.lr == 5e-7
    assert config.rollout.train.tags == ("FrozenLake", "Bandit")
    assert config.env.format.format_penalty == -0.25
    assert config.eval.before is False
    assert config.log.name is None
    assert config.env.options == {"size": 3, "name": "no"}
    assert config.envs == {"lake": EnvConfig(name="frozen_lake")}


@pytest.mark.parametrize(
    "words",
    [["--train.lr"], ["--train.lr", "--seed", "3"], ["train.lr"], ["=3"], ["a..b=3"], ["a=["]],
)
def test_an_override_that_is_none_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_overrides(words)


def test_files_extend_recipes_and_files_and_later_layers_win(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "extends: frozen_lake\ntrain: {max_turn: 4, lr: 1e-4}\nenv: {options: {size: 3}}\n"
    )
    (tmp_path / "top.yaml").write_text(
        "extends: base.yaml\ntrain: {max_turn: 6}\nenv: {options: {p: 0.9}}\n"
    )
    config = load_config(tmp_path / "top.yaml", ["train.steps=2"])
    assert (config.train.max_turn, config.train.lr, config.train.steps) == (6, 1e-4, 2)
    assert config.env.options["size"] == 3
    assert config.env.options["p"] == 0.9
    assert config.algo == load_config("frozen_lake").algo


@pytest.mark.parametrize("value", ["-.inf", ".inf", ".nan"])
@pytest.mark.parametrize("key", ["env.format.format_penalty", "train.lr", "algo.lam"])
def test_a_number_that_is_not_finite_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: input should be"):
        load_config("default", [f"{key}={value}"])


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (problem,) = problems_of(tmp_path / "a.yaml")
    assert "extends itself" in problem


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_loads_and_says_what_it_is(name: str) -> None:
    load_config(name)
    assert len(list_recipes()[name]) > 10


def test_neither_file_nor_recipe() -> None:
    (problem,) = problems_of("frozen_lak")
    assert "did you mean frozen_lake?" in problem


@pytest.mark.parametrize("text", ["train: [", "- 1\n- 2\n", "train: {lr: 1, lr: 2}"])
def test_bad_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    (problem,) = problems_of(tmp_path / "bad.yaml")
    assert "bad.yaml" in problem


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("train.max_tun", "train.max_turn"),
        ("train.leaning_rate", "train.lr"),
        ("algo.warmup_step", "train.warmup_steps"),
        ("trian.lr", "train.lr"),
        ("train_cfgs.max_trun", "train_cfgs.max_turn"),
        ("envs.lake.max_trun", "envs.lake.max_turn"),
        ("envs.lake.format.thnk", "envs.lake.format.think"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, guess: str) -> None:
    (problem,) = problems_of(None, (f"{key}=3",))
    assert problem.startswith(f"{key}: unknown key")
    assert f"Did you mean {guess}?" in problem


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_turn=three", ["train.max_turn", "integer", "'three'"]),
        ("train.max_turn=true", ["train.max_turn", "integer", "True"]),
        ("train.max_turn='3'", ["train.max_turn", "integer", "'3'"]),
        ("train.max_turn=0", ["train.max_turn", "greater than or equal to 1", "0"]),
        ("train.multi_turn=1", ["train.multi_turn", "boolean", "1"]),
        ("train.lr=fast", ["train.lr", "number", "'fast'"]),
        ("algo.name=pppo", ["algo.name", "'bi_level_gae'", "'pppo'"]),
        ("rollout.train.tags=FrozenLake", ["rollout.train.tags", "tuple", "'FrozenLake'"]),
        ("rollout.train.tags=[1]", ["rollout.train.tags.0", "string", "1"]),
        ("model.lora.target_modules=3", ["model.lora.target_modules", "all-linear", "3"]),
        ("train=3", ["train", "section", "3"]),
        ("train_cfgs.max_turn=x", ["train.max_turn", "integer", "'x'", "train_cfgs.max_turn"]),
        ("verl.a=3", ["verl", "backend"]),
    ],
)
def test_a_wrong_value_names_path_value_and_expectation(override: str, expected: list[str]) -> None:
    (problem,) = problems_of(None, (override,))
    for text in expected:
        assert text in problem


def test_all_problems_are_listed_at_once() -> None:
    found = problems_of(
        {"train": {"max_tun": 3, "lr": "fast"}, "sed": 1}, ("algo.gama=1", "train.steps=-1")
    )
    assert len(found) == 5
    for path in ("train.max_tun", "train.lr", "sed", "algo.gama", "train.steps"):
        assert any(problem.startswith(f"{path}:") for problem in found), path


def test_an_empty_section_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("train:\nenv:\n  format:\n")
    assert load_config(tmp_path / "empty.yaml") == Config()


KEYS = [
    *known_fields(),
    *RULES,
    "envs.a",
    "envs.a.format.think",
    "custom_envs.a.env_type",
    "unknown",
    "max_turn",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(allow_nan=False)
    | st.sampled_from(["a", "grpo", "gae", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "name", "tag"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@examples(150)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=6),
    st.sampled_from(["native", "verl"]),
)
def test_any_tree_loads_and_round_trips_or_is_refused(
    pairs: list[tuple[str, object]], backend: str
) -> None:
    tree: dict[str, object] = {"backend": backend}
    for path, value in pairs:
        set_path(tree, path, value)
    try:
        config = load_config(tree)
    except ConfigError:
        return
    assert load_config(parse_yaml(show_config(config))) == config


def test_show_round_trips() -> None:
    config = load_config(
        None,
        [
            *(
                "train.lr=5e-7",
                "log.name='1e5'",
                "env.options={a: [1, no], b: null}",
                "rollout.train.tags=[a, b]",
            ),
            *(
                "model.lora.target_modules=[q, v]",
                "envs.a.max_turn=2",
                "backend=verl",
                "verl={trainer.nnodes: 2}",
            ),
        ],
    )
    assert load_config(parse_yaml(show_config(config))) == config


@examples(60)
@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_yaml_round_trips_every_scalar(text: str, number: float, integer: int) -> None:
    if not text.isprintable():
        text = repr(text)
    data = {"a": text, "b": [number, integer], "c": {"d": None, "e": True}}
    assert parse_yaml(dump_yaml(data)) == data


@examples(30)
@given(
    st.sampled_from(
        [
            "1e5",
            "5e-7",
            "no",
            "yes",
            "on",
            "null",
            "~",
            "true",
            "010",
            "1:30",
            "2024-01-01",
            ".5",
            "",
            "<<",
        ]
    )
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    config = Config(log=LogConfig(project=text))
    assert load_config(parse_yaml(show_config(config))) == config


LEAVES = [path for path, field in iter_fields() if section_of(field) is None]


@pytest.mark.parametrize("path", LEAVES)
def test_every_leaf_of_the_schema_can_be_set_to_its_default(path: str) -> None:
    value = attrgetter(path)(Config())
    plain = list(value) if isinstance(value, tuple) else value
    assert load_config(None, [f"{path}={json.dumps(plain)}"]) == Config()


def test_the_store_of_seed_002() -> None:
    config = ConfigStore()
    config.training.num_epochs = 10
    config.environment.name = "simple_game"
    config.model.model_name = "some/model"
    config.algorithm.clip_ratio = 0.3
    resolved = config.to_config()
    assert resolved.train.steps == 10
    assert resolved.env.name == "simple_game"
    assert resolved.model.path == "some/model"
    assert (resolved.algo.clip_low, resolved.algo.clip_high) == (0.3, 0.3)


def test_an_environment_takes_its_section_of_the_store() -> None:
    config = ConfigStore()
    assert SimpleGameEnvironment(config.environment).size == SimpleGameEnvironment().size
    config.environment.size = 4
    config.environment.max_steps = 7
    env = SimpleGameEnvironment(config.environment)
    assert (env.size, env.max_steps) == (4, 7)
    assert config.to_config().env.options == {"size": 4}


def test_the_store_reads_defaults_and_other_spellings() -> None:
    config = ConfigStore()
    assert config.training.num_epochs == Config().train.steps
    config.train.steps = 7
    assert config.training.num_epochs == 7
    config.environment = {"name": "bandit", "max_turns": 2}
    assert dict(config.environment) == {"name": "bandit", "max_turns": 2}
    assert config.env.max_turn == 2


def test_the_store_refuses_what_it_does_not_know() -> None:
    config = ConfigStore()
    with pytest.raises(AttributeError, match=r"training\.num_epochs\?"):
        config.training.num_epoch = 10
    with pytest.raises(AttributeError, match="Did you mean training"):
        config.trainin  # noqa: B018
    with pytest.raises(AttributeError, match="is a section"):
        config.training = 3
    with pytest.raises(AttributeError, match="rewards come from"):
        config.model_cfgs.remote_rm_url = "http://host"
    config.training.num_epochs = "many"
    with pytest.raises(ConfigError, match=r"train\.steps.*'many'"):
        config.to_config()


def test_another_environment_does_not_inherit_what_was_said_of_the_first() -> None:
    """`turnwise train --env.name mine.py:Env` begins with a recipe that has options for
    FrozenLake."""
    config = load_config("frozen_lake", ["--env.name", "bandit", "env.options.high=2.0"])
    assert config.env.options == {"high": 2.0}
    assert config.env.system_prompt is None
    same = load_config("frozen_lake", ["env.name=frozen_lake", "env.options.size=5"])
    assert same.env.options["size"] == 5
    assert same.env.options["random_start"] is True
    assert same.env.system_prompt is not None
