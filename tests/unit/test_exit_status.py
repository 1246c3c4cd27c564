"""The exit status of every command: 2 where a file, run, class or option of the command line is
missing or cannot be loaded, 1 where the work itself fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.cli.main import COMMANDS, main

FILES = {
    "shop.py": """
from turnwise import BaseEnv

class Shop(BaseEnv):
    actions = ("buy", "leave")

    def __init__(self, price=1):
        self.price = price

    def reset(self, seed=None):
        return f"A shop, number {seed}."

    def step(self, action):
        return "Done.", 1.0, True, {}

class Sized(Shop):
    def __init__(self, size):
        self.size = size

class BadInit(Shop):
    def __init__(self):
        self.price = {}["price"]

class NoFile(Shop):
    def __init__(self):
        open("catalog.json")

class BadReset(Shop):
    def reset(self, seed=None):
        raise RuntimeError("no catalog")

def silent(situation):
    return ""
""",
    "bad.py": "class Shop:\n    def reset(self):\n        return (\n",
    "needs.py": "import not_there_at_all\nclass Shop: ...\n",
    "episodes.jsonl": "{}\n",
    "empty/keep": "",
    "runs/keep": "",
}
NO_FILE, NO_CLASS, NO_RUN = "there is no file no.py", "did you mean Shop?", "is not a run directory"
BROKEN = "SyntaxError: '(' was never closed (bad.py, line 3)"
NO_MODULE = "No module named 'not_there_at_all' (needs.py, line 1)"
NO_OPTION = "environment 'shop.py:Sized' cannot do without env.options.size; set it"
IN_INIT = "KeyError: 'price' (shop.py, line 21)"
NO_CATALOG = "'catalog.json' (shop.py, line 25)"
NAMED = {
    "no.py:Shop": NO_FILE,
    "shop.py:Shp": NO_CLASS,
    "shop.py:Sized": NO_OPTION,
    "bad.py:Shop": BROKEN,
    "needs.py:Shop": NO_MODULE,
    "shop.py:BadInit": IN_INIT,
    "shop.py:NoFile": NO_CATALOG,
}
"""Names of environments, and what is said of them."""
WITH_ENVIRONMENTS = {
    "train": "train --env.name {}",
    "eval": "eval --player random --episodes 2 --env {}",
    "rollout": "rollout --player random --episodes 2 --env {}",
    "play": "play {}",
    "serve-env": "serve-env {} --port 0",
    "sweep": "sweep --env.name {}",
    "sft": "sft random --write out.jsonl --env.name {}",
}
"""Commands that make an environment."""
USAGE = (
    *(
        (line.format(name), said)
        for line in WITH_ENVIRONMENTS.values()
        for name, said in NAMED.items()
    ),
    ("check-env no.py:Shop", NO_FILE),
    ("check-env shop.py:Shp", NO_CLASS),
    ("check-env shop.py:Sized", NO_OPTION),
    ("check-env shop.py:Shop --env.options.prise 3", "did you mean 'price'?"),
    ("check-env no_module:Shop", "there is no module 'no_module'"),
    ("check-env sokoban --levels no.txt", "no level file at no.txt"),
    ("train no.yaml", "there is no file no.yaml"),
    ("train --resume runs/none", NO_RUN),
    ("train algo.name=no.py:mine", NO_FILE),
    ("train log.callbacks=[no.py:Mine]", NO_FILE),
    ("train model.path=./none", "./none does not exist"),
    ("eval runs/none", "there is no run"),
    ("eval bandit --player script:no.py:f", NO_FILE),
    ("eval bandit --player random --episodes 2 --against runs/none", "there is no run"),
    ("rollout runs/none", "there is no run"),
    ("rollout bandit --player script:shop.py:f", "has no 'f'"),
    ("serve runs/none", "there is no run"),
    ("inspect runs/none", "there is no folder runs/none"),
    ("inspect runs/none --export x.html", NO_RUN),
    ("report runs/none", NO_RUN),
    ("compare runs/none empty", NO_RUN),
    ("replay no.jsonl", "there is no file no.jsonl"),
    ("replay episodes.jsonl --config no.yaml", "there is no config at no.yaml"),
    ("doctor runs/none", NO_RUN),
    ("export empty", NO_RUN),
    ("push runs/none out", NO_RUN),
    ("sft no.yaml", "there is no file no.yaml"),
    ("sft no.jsonl --write out.jsonl", "no.jsonl"),
    ("sft --resume runs/none", NO_RUN),
    ("sweep no.yaml", "there is no file no.yaml"),
    ("watch runs/none", NO_RUN),
    ("work http://127.0.0.1:1 agent:no.py:f", NO_FILE),
    ("work http://127.0.0.1:1 agent:shop.py:f", "has no 'f'"),
    ("work http://127.0.0.1:1 agent:bad.py:f", BROKEN),
    ("serve-policy shop.py:f", "PROGRAM is agent:FILE.py:FUNCTION"),
    ("config show no.yaml", "there is no file no.yaml"),
    ("migrate no.yaml", "no.yaml"),
)
FAILURES = (
    ("check-env bad.py:Shop", BROKEN),
    ("check-env shop.py:BadInit", IN_INIT),
    ("check-env shop.py:BadReset --seeds 1", "no catalog"),
    ("eval --env shop.py:BadReset --player random --episodes 2", "no catalog"),
    ("rollout --env shop.py:BadReset --player random --episodes 2", "no catalog"),
    ("play shop.py:BadReset", "no catalog"),
)
WITHOUT_NAMES = {"envs", "init", "completion"}
"""Commands that are given nothing that could be missing."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = tmp_path_factory.mktemp("status")
    for name, text in FILES.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text.removeprefix("\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TURNWISE_TOKEN", "a-token-of-this-test")
        yield where


def test_every_command_is_in_the_table() -> None:
    assert {command.split()[0] for command, _ in USAGE} == set(COMMANDS) - WITHOUT_NAMES


@pytest.mark.parametrize(
    ("command", "says", "status"),
    [(*row, 2) for row in USAGE] + [(*row, 1) for row in FAILURES],
    ids=[command for command, _ in (*USAGE, *FAILURES)],
)
def test_the_status_says_whose_mistake_it_is(
    command: str, says: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    told = capfd.readouterr()
    said = told.err + told.out
    assert ended.value.code == status, said
    assert says in said, said
    assert said.count(", line ") <= 1, "a line is told once"
