"""The oldest and the newest TRL, each in a folder of its own, and the check of a release at
import."""

import dataclasses
from pathlib import Path

import pytest
from old_release import HERE, install, newest, run_with
from trl import GRPOConfig, GRPOTrainer

from turnwise.integrations.trl import releases
from turnwise.integrations.trl.releases import check_release

OLDEST = "1.0.0"


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("release", [OLDEST, "newest"])
def test_a_release_trains(request, tmp_path, release):
    version = newest("trl") if release == "newest" else release
    folder = install(request, f"trl-{version}", f"trl=={version}")
    said = run_with(folder, HERE / "trl_old_release.py", str(tmp_path))
    assert f"trl {version}" in said
    assert said.count("\nok ") == 6


def test_pyproject_names_it():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"trl>={OLDEST.removesuffix(".0")},!=1.15.0' in text
    assert releases.TESTED.startswith(OLDEST.removesuffix(".0"))


def test_a_changed_signature_is_named():
    class Next(GRPOTrainer):
        def _calculate_rewards(self, batch):
            return super()._calculate_rewards(**batch)

    with pytest.raises(ImportError, match=r"TRL 1.0 to .*TRL 9.9.9 is installed") as error:
        check_release(Next, GRPOConfig, "9.9.9")
    wrong = "parameter inputs, prompts, completions, completion_ids_list of "
    assert f"lacks: {wrong}GRPOTrainer._calculate_rewards;" in str(error.value)


def test_a_missing_method_key_and_setting_are_named(monkeypatch):
    monkeypatch.setitem(releases.PARAMETERS, "_generate_all_turns", ())
    monkeypatch.setattr(releases, "KEYS", (*releases.KEYS, "token_rewards"))
    monkeypatch.setattr(releases, "ATTRIBUTES", (*releases.ATTRIBUTES, "_turn_metrics"))
    fields = [(f.name, f.type, f) for f in dataclasses.fields(GRPOConfig) if f.name != "beta"]
    config = dataclasses.make_dataclass("Config", fields, kw_only=True)
    with pytest.raises(ImportError) as error:
        check_release(GRPOTrainer, config, "9.9.9")
    assert (
        "lacks: GRPOTrainer._generate_all_turns; key 'token_rewards'; attribute _turn_metrics; "
        "GRPOConfig.beta;" in str(error.value)
    )
