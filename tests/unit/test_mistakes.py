"""Sixty realistic mistakes, each as a command: no traceback, a status that says so, and a message
that names what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from turnwise.cli.main import main

FILES = {
    "shop.py": """
import time
from turnwise import BaseEnv, Callback

class Shop(BaseEnv):
    instruction = "Buy it."
    actions = ("buy", "leave")

    def __init__(self, price=1):
        self.price = price

    def reset(self, seed=None, **kwargs):
        return f"A shop, number {seed}."

    def step(self, action):
        return "Done.", 1.0, True, {}

class Raises(Shop):
    def step(self, action):
        return self.prices[action], 1.0, True, {}

class NoSeed(Shop):
    def reset(self):
        return "A shop."

class BadReset(Shop):
    def reset(self, seed=None):
        raise RuntimeError("no catalog")

class BadInit(Shop):
    def __init__(self):
        raise FileNotFoundError("catalog.json")

class Nan(Shop):
    def step(self, action):
        return "Done.", float("nan"), True, {}

class Short(Shop):
    def step(self, action):
        return "Done.", 1.0

class OneText(Shop):
    actions = "buy"

class Hangs(Shop):
    def step(self, action):
        time.sleep(60)

class SlowInit(Shop):
    def __init__(self):
        time.sleep(60)

class Silent(BaseEnv):
    instruction = "Say anything."
    def reset(self, seed=None): return "Go."
    def step(self, action): return "Ok.", 1.0, True, {}

class Tells(Callback):
    def on_start(self, run): {}["nope"]

class Long(Shop):
    actions = ("buy one two three four five six", "leave one two three four five six")

number = 3
def wrong(situation): return 7
def raises(situation): return {}["key"]
""",
    "broken.py": "class Shop(:\n",
    "needs.py": "import not_there_at_all\nclass Shop: ...\n",
    "bad.yaml": "train: {steps: 3\n",
    "list.yaml": "- train\n",
    "twice.yaml": "train: {lr: 1, lr: 2}\n",
    "typo.yaml": "train: {max_tun: 3}\n",
    "type.yaml": "train: {steps: many}\n",
    "contradiction.yaml": "train: {max_turn: 3}\nenv: {max_turn: 4}\n",
    "extends.yaml": "extends: no_such_recipe\n",
    "prompts.jsonl": '{"prompt": "2+2", "answer": "4"}\n',
    "torn.jsonl": '{"prompt": "2+2"\n{"prompt": "a"}\n',
    "noprompt.jsonl": '{"question": "2+2"}\n{"question": "3"}\n',
    "models/qwen/config.json": "{}",
    "empty/keep": "",
    "kept/lake/config.yaml": "seed: 1\n",
    "kept/torn/config.yaml": "train: {max_tun: 3}\n",
    "notes.txt": "hello",
}


@dataclass(frozen=True)
class Mistake:
    command: str
    says: tuple[str, ...]
    """Parts of the message: what is wrong, and what to do."""
    status: int = 2


TINY = "model.embedded.warmstart_episodes=16 rollout.train.env_groups=2 eval.episodes=2"
MISTAKES = (
    # The command and its words.
    Mistake("trian", ("No such command 'trian'", "Did you mean 'train'?")),
    Mistake("train frozen_lak", ("neither a file nor a recipe", "did you mean frozen_lake?")),
    Mistake("train mine.yaml", ("there is no file mine.yaml",)),
    Mistake("train bandit rollout.generator=no.py:Mine", ("there is no file no.py",)),
    Mistake("train bandit sft.source=no.jsonl", ("'no.jsonl' is neither a player", "a file")),
    Mistake("train shop.py:Shop", ("is an environment", "write --env.name shop.py:Shop")),
    Mistake("train shop.py", ("is an environment", "write --env.name shop.py:CLASS")),
    Mistake("train frozen_lake bandit", ("give one recipe or config file",)),
    Mistake("train --train.steps", ("--train.steps: needs a value",)),
    Mistake("train steps 3", ("give one recipe or config file",)),
    Mistake("train --max-turns 3", ("max-turns: unknown key", "Did you mean")),
    Mistake("train --lr=[", ("not YAML", "quote it")),
    Mistake("train --nodes 2", ("--nodes only work with backend verl",)),
    Mistake("train --backend pytorch", ("backend: input should be 'native', 'trl' or 'verl'",)),
    Mistake(
        "train --resume runs/none", ("runs/none is not a run directory", "give a folder of runs/")
    ),
    Mistake("train --resume empty", ("empty is not a run directory",)),
    Mistake("train frozen_lake --resume empty", ("--resume uses the run's own config",)),
    # Files.
    Mistake("train bad.yaml", ("bad.yaml is not YAML",)),
    Mistake("train list.yaml", ("list.yaml must hold keys and values, as in train:",)),
    Mistake("train twice.yaml", ("twice.yaml", "lr")),
    Mistake("train typo.yaml", ("train.max_tun: unknown key. Did you mean train.max_turn?",)),
    Mistake("train type.yaml", ("train.steps: input should be a valid integer", "'many'")),
    Mistake("train contradiction.yaml", ("env.max_turn", "contradicts train.max_turn", "keep one")),
    Mistake("train extends.yaml", ("'no_such_recipe' is neither a file nor a recipe",)),
    Mistake("train notes.txt", ("notes.txt must hold keys and values",)),
    # Keys and values.
    Mistake("train --train.lr -1", ("train.lr: input should be greater than 0, got -1",)),
    Mistake("train --train.lr fast", ("train.lr: input should be a valid number, got 'fast'",)),
    Mistake("train --train.steps 0", ("train.steps: 0 trains nothing", "set sft.source")),
    Mistake("train --algo.name grop", ("algo.name: input should be 'ppo'", "got 'grop'")),
    Mistake("train --algorithm grpo", ("algorithm: unknown key. Did you mean algo.name?",)),
    Mistake("train --model qwen", ("model: is a section", "Did you mean model.path?")),
    Mistake("train --env shop.py:Shop", ("env: is a section", "Did you mean env.name?")),
    Mistake("train --train.learning_rate 1e-5", ("train.learning_rate: unknown key", "train.lr")),
    Mistake("train --train 5", ("train: is a section with its own keys, got 5",)),
    Mistake("train --log.name a/b", ("log.name", "names one folder", "set log.dir")),
    Mistake("train --log.name ..", ("log.name", "names one folder")),
    Mistake("train --env.max_turn 3 --train.max_turn 4", ("contradicts train.max_turn = 4",)),
    Mistake("train algo.name=grpo algo.lam=0.9", ("algo.lam=0.9 means nothing", "remove it")),
    Mistake("train algo.name=grpo rollout.train.group_size=1", ("compares", "algo.singleton")),
    Mistake("train rollout.top_k=5", ("rollout.top_k = 5", "training needs top_k: 0")),
    Mistake("train rollout.temperature=0", ("training needs a temperature above 0",)),
    Mistake("train model.embedded.hidden_size=50", ("must be a multiple of num_heads",)),
    Mistake("train train.device=gpu", ("train.device", "cpu, cuda or cuda:N")),
    Mistake("train train.device=cuda", ("this torch sees no CUDA device; use cpu or auto",)),
    Mistake(
        f"train --env.name shop.py:Shop rollout.max_context=8 {TINY}",
        ("rollout.max_context=8", "raise it"),
    ),
    Mistake(
        f"train --env.name shop.py:Long rollout.max_response_tokens=2 {TINY}",
        ("rollout.max_response_tokens=2 cuts most replies", "tokens; set rollout.max_response"),
    ),
    Mistake("train log.trackers=[wandbb]", ("log.trackers", "'wandb'")),
    Mistake("train trl.beta=1", ("settings under 'trl' are not used by backend 'native'",)),
    Mistake("train train.compile=true", ("train.compile is for CUDA", "set it to false")),
    # Models.
    Mistake("train model.path=./qwen", ("./qwen does not exist", "give a folder")),
    Mistake("train model.path=models/qwem", ("did you mean models/qwen?",)),
    Mistake("train model.path=qwen_model/v1/final", ("does not exist", "give a folder")),
    Mistake("train model.path=empty", ("empty has no config.json", "save_pretrained")),
    Mistake("train model.path=notes.txt", ("notes.txt is no folder",)),
    Mistake("train model.path=models/qwen", ("models/qwen", "model_type")),
    # Environments.
    Mistake(
        "train --env.name frozenlake2", ("no environment is called 'frozenlake2'", "frozen_lake")
    ),
    Mistake("train --env.name shop.py", ("named with its class, as in shop.py:MyEnv",)),
    Mistake("train --env.name shop.py:Shp", ("shop.py has no 'Shp'; did you mean Shop?",)),
    Mistake("train --env.name shp.py:Shop", ("there is no file shp.py",)),
    Mistake("train --env.name shop.py:number", ("must name a class or a function",)),
    Mistake("train --env.name broken.py:Shop", ("SyntaxError", "broken.py, line 1")),
    Mistake(
        "train --env.name needs.py:Shop", ("No module named 'not_there_at_all'", "needs.py, line 1")
    ),
    Mistake("train --env.name shop.py:BadInit", ("FileNotFoundError: catalog.json", "line 31")),
    Mistake(
        "train --env.name shop.py:SlowInit rollout.reset_timeout=0.5",
        ("took longer than 0.5 s", "rollout.reset_timeout"),
    ),
    Mistake("train --env.name shop.py:Shop --env.options.prise 3", ("prise", "price")),
    Mistake(f"train --env.name shop.py:Raises {TINY}", ("AttributeError", "shop.py, line 19"), 1),
    Mistake(f"train --env.name shop.py:BadReset {TINY}", ("no catalog", "shop.py, line 27"), 1),
    Mistake(
        f"train --env.name shop.py:Nan {TINY}", ("a reward must be a finite number, got nan",), 1
    ),
    Mistake(
        f"train --env.name shop.py:Short {TINY}",
        ("step returns (observation, reward, done, info)",),
        1,
    ),
    Mistake(f"train --env.name shop.py:OneText {TINY}", ("write ('buy',)",)),
    Mistake(f"train --env.name shop.py:Silent {TINY}", ("random_action", "model.path")),
    Mistake(
        f"train bandit log.callbacks=[shop.py:Tells] train.steps=1 {TINY}",
        ("error: callback Tells: on_start raised KeyError: 'nope' (shop.py, line 58)",),
        1,
    ),
    Mistake("check-env", ("Missing argument 'name'",)),
    Mistake("check-env frozenlak", ("frozenlak", "frozen_lake")),
    Mistake("check-env shop.py:Raises --seeds 1", ("AttributeError", "shop.py, line 19"), 1),
    Mistake(
        "check-env shop.py:Hangs --seeds 1 --rollout.step_timeout 0.5",
        ("step took longer than 0.5 s", "raise rollout.step_timeout"),
        1,
    ),
    Mistake("play", ("name an environment", "turnwise play frozen_lake")),
    Mistake("play shop.py:Shp", ("did you mean Shop?",)),
    # Prompts.
    Mistake(
        "train data.prompts=nothing.jsonl data.reward=shop.py:wrong",
        ("data.prompts: there is no file nothing.jsonl",),
    ),
    Mistake(
        "train data.prompts=prompts.jsonl data.reward=shop.py:wrong",
        ("training on data.prompts needs model.path",),
    ),
    Mistake(
        "train data.prompts=prompts.jsonl model.path=models/qwen",
        ("needs data.reward: a function",),
    ),
    Mistake(
        "train data.prompts=torn.jsonl data.reward=shop.py:wrong model.path=models/qwen",
        ("torn.jsonl, line 1 cannot be read",),
    ),
    Mistake(
        "train data.prompts=noprompt.jsonl data.reward=shop.py:wrong model.path=models/qwen",
        ("noprompt.jsonl", "data.prompt_column"),
    ),
    # Evaluation, replay, other commands.
    Mistake("eval openai:http://localhost:1#m", ("--player openai:http://localhost:1#m",)),
    Mistake(
        "eval bandit --player openai:http://127.0.0.1:1#m --episodes 2",
        ("nothing listens at http://127.0.0.1:1", "start the server"),
        1,
    ),
    Mistake("eval --player openai:http://localhost:1", ("names no model", "openai:URL#MODEL")),
    Mistake("eval --player gpt4", ("unknown player 'gpt4'", "players are random")),
    Mistake("eval empty", ("empty is neither a run directory",)),
    Mistake("eval runs/none", ("there is no run, checkpoint, model or config at runs/none",)),
    Mistake("eval --player random --split test", ("--split is val or train, got 'test'",)),
    Mistake(
        "eval --player random --episodes 0",
        ("Invalid value for '--episodes'", "greater than or equal to 1"),
    ),
    Mistake("eval --player script:shop.py:nobody", ("has no 'nobody'",)),
    Mistake("eval --player script:shop.py:wrong --episodes 2", ("returned int", "text")),
    Mistake(
        "eval --player script:shop.py:raises --episodes 2", ("KeyError: 'key'", "shop.py, line"), 1
    ),
    Mistake(
        "eval --player random --without-thought --episodes 2",
        ("--without-thought begins the replies of a policy", "--player random"),
    ),
    Mistake("eval --against thought", ("--against thought", "--without-thought", "add it")),
    Mistake("eval --player random --env nope", ("no environment is called 'nope'", "did you mean")),
    Mistake("replay nothing.jsonl", ("nothing.jsonl",)),
    Mistake("replay prompts.jsonl", ("there is no config at prompts.config.yaml", "give --config")),
    Mistake("rollout --player random --split test", ("--split is train or val",)),
    Mistake("config show frozen_lak", ("did you mean frozen_lake?",)),
    Mistake("config keys trian", ("there is no key trian; did you mean train",)),
    Mistake("doctor empty", ("empty is not a run directory",)),
    Mistake("watch runs/none", ("runs/none is not a run directory", "give a folder of runs/")),
    Mistake("watch kept", ("kept is not a run directory", "the newest is kept/")),
    Mistake("watch kept/torn", ("kept/torn is not a run directory", "Did you mean train.max_turn")),
    Mistake("watch kept/lake --stay", ("--stay needs a terminal",)),
    Mistake("serve-env nope", ("no environment is called 'nope'", "did you mean")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text.removeprefix("\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield where


def test_there_are_sixty() -> None:
    assert len({mistake.command for mistake in MISTAKES}) >= 60


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.command[:60])
def test_a_mistake_is_told_with_its_remedy(
    mistake: Mistake, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(mistake.command.split())
    told = capfd.readouterr()
    said = told.err + told.out
    assert ended.value.code == mistake.status, said
    assert "Traceback" not in said
    for part in mistake.says:
        assert part in " ".join(said.split()), said
    assert len(told.err) < 1500, "a short message is read"
    left = [
        path.name for path in (folder / "runs").glob("*") if not (path / "ledger.jsonl").exists()
    ]
    assert not left, "nothing is left lying about"
