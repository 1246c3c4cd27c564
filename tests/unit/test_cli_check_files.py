"""`turnwise check-env` on level and game files: what it says, and its exit status."""

import gzip
from pathlib import Path

import pytest

from turnwise.cli.main import main

LEVEL = "; 0\n######\n#@$. #\n######\n"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["check-env", *words])
    return int(stop.value.code or 0)


def test_levels_pass_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.txt.gz"
    good.write_bytes(gzip.compress(LEVEL.encode()))
    assert run("sokoban", "--levels", str(good)) == 0
    assert "1 of 1 levels are playable" in capsys.readouterr().out
    bad = tmp_path / "bad.txt"
    bad.write_text(LEVEL.replace("@", " "))
    assert run("sokoban", "--levels", str(bad)) == 1
    assert "exactly one player" in capsys.readouterr().out
    assert run("sokoban", "--levels", str(tmp_path / "none.txt")) == 2


def test_walkthroughs_of_made_games(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from turnwise.envs.games.alfworld import GameMaker, save_games
    from turnwise.envs.games.alfworld.rooms import sample_plans

    path = tmp_path / "games.jsonl"
    maker = GameMaker(sample_plans())
    save_games(path, games=[maker.make(seed, split="train") for seed in range(3)])
    assert run("alfworld", "--games", str(path), "--walkthroughs") == 0
    assert "3 of 3 walkthroughs reach their goal" in capsys.readouterr().out
    path.write_text("{}\n")
    assert run("alfworld", "--games", str(path), "--walkthroughs") != 0


def test_files_that_belong_to_another_environment_are_refused(tmp_path: Path) -> None:
    assert run("bandit", "--levels", str(tmp_path)) == 2
    assert run("alfworld", "--games", str(tmp_path / "g.jsonl")) == 2
