"""Environments by name, lazily, with errors that help."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.config.schema import EnvConfig
from turnwise.envs import registry
from turnwise.envs.base import BaseEnv
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.envs.games.simple_game import SimpleGameEnvironment
from turnwise.isolation.worker import handle

FIRST = {"bandit", "frozen_lake", "countdown", "simple_game"}


@pytest.mark.parametrize(
    "name", ["frozen_lake", "FrozenLake", "frozenlake", "Frozen-Lake", "FROZEN_LAKE"]
)
def test_spelling_of_names_does_not_matter(name: str) -> None:
    assert isinstance(registry.make(name), FrozenLake)


def test_names_of_the_first_environments() -> None:
    specs = {spec.name: spec for spec in registry.list_envs()}
    assert set(specs) >= FIRST
    assert all(spec.summary for spec in specs.values())
    assert isinstance(registry.make("SimpleGameEnvironment"), SimpleGameEnvironment)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("frozen_lak", "did you mean frozen_lake"),
        ("zzz", "there are .*bandit.*module:Class"),
        ("turnwise.envs.games.bandit:Bandits", "did you mean Bandit"),
        ("no_such_file.py:Env", "there is no file"),
        ("no.such:Env", "no module 'no'; is it installed"),
        ("turnwise.envs.games.bandit:_TRAIN_ARMS", "class or a function"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(registry.UnknownEnvError, match=message):
        registry.make(name)


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'frozen_lake' has no option 'sise'; did you mean 'size'"
    ):
        registry.make("frozen_lake", {"sise": 4})


def test_unknown_reset_options_are_refused() -> None:
    env = registry.make_env(EnvConfig(name="frozen_lake", reset_options={"sed": 1}))
    with pytest.raises(Exception, match="no option 'sed'"):
        env.reset(env.make_task(0, "train"))


def test_missing_packages_name_the_extra() -> None:
    registry.register("needy", "nowhere:Env", extra="webshop", needs=("no_such_package_here",))
    try:
        spec = registry.find_env("needy")
        assert (spec.available, spec.missing) == (False, ("no_such_package_here",))
        with pytest.raises(ImportError, match=r"no_such_package_here.*turnwise\[webshop\]"):
            registry.make("needy")
    finally:
        registry.unregister("needy")


class Mine(BaseEnv):
    """Ends at once."""

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return f"seed {seed}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return action, 1.0, True, {}


def test_register_takes_classes_aliases_and_strings() -> None:
    registry.register("mine", Mine, aliases=("MyOwn",))
    try:
        assert isinstance(registry.make("my_own"), Mine)
    finally:
        registry.unregister("mine")
    with pytest.raises(registry.UnknownEnvError):
        registry.make("mine")


def test_environments_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_env.py"
    file.write_text(
        "from turnwise.envs.base import BaseEnv\n"
        "class Yes(BaseEnv):\n"
        "    def reset(self, seed=None, **kwargs): return 'yes?'\n"
        "    def step(self, action): return 'yes', 1.0, True, {}\n"
    )
    env = registry.make_env(EnvConfig(name=f"{file}:Yes"))
    assert env.reset(env.make_task(1, "train")).messages[-1].content == "yes?"


def test_entry_points_of_other_packages(tmp_path: Path) -> None:
    (tmp_path / "other_envs.py").write_text(
        "from turnwise.envs.games.bandit import Bandit as Other\n"
    )
    info = tmp_path / "other_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise.envs]\nother_bandit = other_envs:Other\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from turnwise.envs.registry import find_env, make\n"
        "assert 'other_envs' not in sys.modules\n"
        "print(type(make('OtherBandit')).__name__, find_env('other_bandit').summary)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Bandit from other-envs"


def test_listing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from turnwise.envs.registry import list_envs; list_envs()\n"
        "print([m for m in ('torch', 'gymnasium', 'transformers', 'turnwise.envs.games.bandit') if "
        "m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_runs_limit_on_turns_counts_where_the_environment_sets_none() -> None:
    assert registry.make_env(EnvConfig(name="frozen_lake"), max_turn=7).max_turns == 7
    assert registry.make_env(EnvConfig(name="frozen_lake", max_turn=3), max_turn=7).max_turns == 3
    assert registry.make_env(EnvConfig(name="bandit"), max_turn=7).max_turns == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'needs.py:Sized' cannot do without env.options.size and env.options.kind; set"),
        ({"size": 3}, "cannot do without env.options.kind; set it"),
        ({"sise": 3}, "has no option 'sise'; did you mean 'size'"),
    ],
)
def test_a_missing_option_is_told_by_its_setting(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("needs.py").write_text("class Sized:\n  def __init__(self, size, *, kind, more=1): ...\n")
    with pytest.raises(registry.EnvOptionsError, match=message):
        registry.make("needs.py:Sized", options)


def test_a_worker_tells_the_line_of_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.py").write_text("class Env:\n    def reset(self):\n        return (\n")
    Path("raises.py").write_text("class Env:\n    def __init__(self):\n        {}['side']\n")
    for name, line in (("torn.py:Env", "(torn.py, line 3)"), ("raises.py:Env", ", line 3)")):
        said = handle({}, {"op": "open", "id": 0, "config": {"name": name}})["error"]
        assert said.endswith(line), said
        assert ".py:3" not in said, said
