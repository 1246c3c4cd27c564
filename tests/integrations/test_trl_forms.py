"""The commonest forms in which GRPOTrainer is called: without an environment, with a single-turn
and with a multi-turn one."""

import importlib
import importlib.util

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl_parts import ThreeTurns, curve, make_args, make_trainer, page_blocks, save_model

from turnwise.envs.base import EnvError
from turnwise.envs.messages import Rubric, SingleTurnEnv, ToolEnv
from turnwise.integrations.trl import VerifiersGRPOTrainer
from turnwise.log.store import RunReader
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(200)
ROWS = [{"prompt": f"{n}?", "answer": n, "info": {"n": n}} for n in range(8)]


def single():
    return SingleTurnEnv(ROWS, Rubric([lambda text: float(len(text))]), val_fraction=0.0)


ENVS = {"none": lambda: None, "single": single, "multi": ThreeTurns}
every_env = pytest.mark.parametrize("kind", ENVS)
with_env = pytest.mark.parametrize("kind", ["single", "multi"])


def trainer_for(kind, folder, *, cls=VerifiersGRPOTrainer, changes=None, **keywords):
    """A trainer of one step on ROWS; without an environment it needs reward functions."""
    keywords = {"processing_class": tiny_tokenizer(), **keywords}
    settings = {"max_steps": 1, "max_completion_length": 12, **(changes or {})}
    if kind == "none":
        keywords.setdefault("reward_funcs", lambda completions, **row: [1.0] * len(completions))
    keywords = {"train_dataset": Dataset.from_list(ROWS), **keywords}
    env = ENVS[kind]()
    named = {} if env is None else {"env": env}
    return cls(tiny_model(), args=make_args(folder, **settings), **named, **keywords)


@pytest.fixture(scope="session")
def reward_models(tmp_path_factory):
    """Two reward models with a tokenizer each, by path."""
    import transformers

    paths = []
    for seed in range(2):
        config = tiny_model().config
        config.num_labels = 1
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("reward_model")
        transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        paths.append(str(folder))
    return paths


# Without an environment.


def test_without_an_environment_it_is_grpo_trainer(tmp_path):
    def run(cls, folder):
        def score(completions, **row):
            return [float(len(text)) for text in completions]

        torch.manual_seed(0)
        trainer = trainer_for("none", folder, cls=cls, reward_funcs=score, changes={"max_steps": 2})
        trainer.train()
        return [curve(trainer, name) for name in ("reward", "loss", "grad_norm")]

    assert run(VerifiersGRPOTrainer, tmp_path / "a") == run(GRPOTrainer, tmp_path / "b")


def test_without_an_environment_its_settings_are_refused(tmp_path):
    for changes in ({"credit": "turn_level"}, {"multi_turn": True}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))}: for an environment only"):
            trainer_for("none", tmp_path, changes=changes)
    with pytest.raises(ValueError, match="algorithm: for an environment only"):
        trainer_for("none", tmp_path, algorithm=object())


def test_close_without_an_environment(tmp_path):
    trainer_for("none", tmp_path).close()


def test_trls_own_loop_of_environment_factory(tmp_path):
    """The class goes to TRL as it is, which plays it with its own tools."""
    pytest.importorskip("jmespath")
    from trl.chat_template_utils import qwen3_chat_template

    seen = []

    def score(completions, environments, **row):
        seen.extend(environments)
        return [0.5] * len(completions)

    trainer = trainer_for(
        "none",
        tmp_path,
        processing_class=tiny_tokenizer(qwen3_chat_template),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": "Go."}], "target": n} for n in range(8)]
        ),
        environment_factory=Guess,
        reward_funcs=score,
    )
    trainer.train()
    assert {type(one) for one in seen} == {Guess}


# What docs/trl.md shows of programs that change to this trainer.


def test_the_pages_trainers_are_made(tmp_path, monkeypatch):
    pytest.importorskip("jmespath")
    from trl.chat_template_utils import qwen3_chat_template

    monkeypatch.chdir(tmp_path)
    of_verifiers, of_trl = page_blocks("trl.md", __file__)
    model = save_model(tmp_path / "model", qwen3_chat_template)
    names = {"model": model, "env": ThreeTurns()}
    exec(of_verifiers, names)
    assert isinstance(names["trainer"], VerifiersGRPOTrainer)
    names = {
        "GRPOTrainer": GRPOTrainer,
        "VerifiersGRPOTrainer": VerifiersGRPOTrainer,
        "model": model,
        "Game": Guess,
        "args": make_args(tmp_path / "run", max_steps=1, max_completion_length=12),
        "score": lambda completions, **row: [0.5] * len(completions),
        "rows": Dataset.from_list(
            [{"prompt": [{"role": "user", "content": "Go."}], "target": n} for n in range(8)]
        ),
    }
    exec(of_trl, names)
    names["trainer"].train()
    assert curve(names["trainer"]) == [0.75]


# Reward functions and models.


@every_env
def test_a_reward_model_by_name(tmp_path, kind, reward_models):
    trainer = trainer_for(kind, tmp_path, reward_funcs=reward_models[0])
    trainer.train()
    assert isinstance(trainer.reward_funcs[-1], torch.nn.Module)
    assert len(trainer.reward_funcs) == (1 if kind == "none" else 2)
    assert curve(trainer, f"rewards/{trainer.reward_func_names[-1]}/std") != [0.0]


@every_env
def test_several_reward_models_with_their_tokenizers(tmp_path, kind, reward_models):
    tokenizers = [tiny_tokenizer(), tiny_tokenizer()]
    trainer = trainer_for(
        kind, tmp_path, reward_funcs=reward_models, reward_processing_classes=tokenizers
    )
    assert trainer.reward_processing_classes[-2:] == tokenizers
    trainer.train()
    with pytest.raises(ValueError, match="reward"):
        trainer_for(
            kind, tmp_path, reward_funcs=reward_models, reward_processing_classes=tokenizers[:1]
        )


@with_env
def test_weights_name_the_environment_first(tmp_path, kind, reward_models):
    with pytest.raises(ValueError, match="the first is the environment's"):
        trainer_for(
            kind, tmp_path, reward_funcs=reward_models, changes={"reward_weights": [1.0, 1.0]}
        )


@every_env
def test_text_prompts_mean_text_for_reward_functions(tmp_path, kind):
    """As in TRL: a data set with text gets functions for text, one with messages those for
    messages."""
    seen = {}

    def score(prompts, completions, answer, **row):
        seen.setdefault("prompts", []).extend(prompts)
        seen.setdefault("completions", []).extend(completions)
        return [float(len(completion)) for completion in completions]

    trainer_for(kind, tmp_path, reward_funcs=score).train()
    assert set(seen["prompts"]) <= {row["prompt"] for row in ROWS}
    assert all(isinstance(completion, str) for completion in seen["completions"])
    assert len(set(map(len, seen["completions"]))) > 1 or kind != "none"
    seen.clear()
    messages = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    trainer_for(
        kind, tmp_path, reward_funcs=score, train_dataset=Dataset.from_list(messages)
    ).train()
    assert {m["role"] for m in seen["completions"][0]} >= {"assistant"}
    assert seen["prompts"][0][-1]["role"] == "user"


@every_env
def test_an_infinite_reward_is_an_error(tmp_path, kind):
    def broken(completions, **row):
        return [1.0] * (len(completions) - 1) + [float("inf")]

    with pytest.raises(ValueError, match=r"'broken' returned inf for completion 7 of 8"):
        trainer_for(kind, tmp_path, reward_funcs=broken).train()


@with_env
def test_all_zero_is_said(tmp_path, kind, monkeypatch):
    nothing = SingleTurnEnv(ROWS, Rubric([lambda text: 0.0]), val_fraction=0.0)
    monkeypatch.setitem(ENVS, "single", lambda: nothing)
    monkeypatch.setattr("trl_parts.WANTED", ("never", "never", "never"))
    trainer = trainer_for(kind, tmp_path, changes={"max_steps": 2})
    with pytest.warns(UserWarning, match="all 8 rewards of this batch are 0") as warned:
        trainer.train()
    assert sum("rewards of this batch" in str(one.message) for one in warned) == 1


def test_no_reward_at_all_is_said(tmp_path):
    def look(what: str) -> str:
        """Looks."""
        return what

    tools = ToolEnv(tools=[look], dataset=ROWS, val_fraction=0.0)
    for env, words in (
        (SingleTurnEnv(ROWS, val_fraction=0.0), "SingleTurnEnv has no rubric"),
        (tools, "ToolEnv has no rubric"),
        (Silent, "Silent has no get_reward"),
    ):
        with pytest.warns(UserWarning, match=words):
            make_trainer(tmp_path, env, trainer={"train_dataset": ROWS})


# Data sets.


@with_env
def test_eval_data_set_at_once(tmp_path, kind):
    trainer = trainer_for(kind, tmp_path, eval_dataset=Dataset.from_list(ROWS[:4]))
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] >= 0
    assert len(trainer.eval_dataset) == 4


@every_env
def test_eval_data_sets_by_name(tmp_path, kind):
    halves = {"a": Dataset.from_list(ROWS[:4]), "b": Dataset.from_list(ROWS[4:])}
    seen = []

    def score(completions, answer, **row):
        seen.extend(answer)
        return [1.0] * len(completions)

    trainer = trainer_for(kind, tmp_path, eval_dataset=halves, reward_funcs=score)
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)
    assert set(seen) == set(range(8))


@every_env
def test_evaluate_takes_data_sets(tmp_path, kind):
    trainer = trainer_for(kind, tmp_path)
    assert "eval_reward" in trainer.evaluate(Dataset.from_list(ROWS[:4]))
    halves = {"a": Dataset.from_list(ROWS[:4]), "b": Dataset.from_list(ROWS[4:])}
    assert {"eval_a_loss", "eval_b_loss"} <= set(trainer.evaluate(halves))


def test_evaluate_plays_held_out_tasks(tmp_path):
    env = SingleTurnEnv(ROWS, Rubric([lambda text: 1.0]), val_fraction=0.5)
    trainer = make_trainer(tmp_path, env, max_completion_length=6)
    assert trainer.evaluate()["eval_reward"] == 1.0


@every_env
def test_an_iterable_data_set(tmp_path, kind):
    seen = []

    def score(completions, answer, info, **row):
        seen.extend(zip(answer, info, strict=True))
        return [float(n) for n in range(len(completions))]

    trainer = trainer_for(
        kind,
        tmp_path,
        train_dataset=Dataset.from_list(ROWS).to_iterable_dataset(),
        eval_dataset=Dataset.from_list(ROWS).to_iterable_dataset(),
        reward_funcs=score,
        changes={"max_steps": 2},
    )
    trainer.train()
    assert len(seen) == 16
    assert all(info == {"n": answer} for answer, info in seen)
    if kind == "multi":
        played = {e.task.payload["answer"] for e in RunReader(tmp_path / "run").episodes(1)}
        assert played == {answer for answer, _ in seen[:8]}
    assert "eval_reward" in trainer.evaluate()


def test_what_an_iterable_data_set_cannot_do(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(ValueError, match="enable_async_generation"):
        trainer_for(
            "multi", tmp_path, train_dataset=stream, changes={"enable_async_generation": True}
        )
    with pytest.raises(ValueError, match="train_dataset is a data set"):
        trainer_for("multi", tmp_path, train_dataset=iter(ROWS))


@every_env
def test_a_missing_prompt_column(tmp_path, kind):
    rows = Dataset.from_list([{"text": "hi", "answer": 1}] * 8)
    with pytest.raises(ValueError, match=r"train_dataset has no column 'prompt'.* text, answer"):
        trainer_for(kind, tmp_path, train_dataset=rows)


@every_env
def test_a_missing_chat_template(tmp_path, kind):
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        trainer_for(
            kind,
            tmp_path,
            processing_class=tiny_tokenizer("none"),
            train_dataset=Dataset.from_list(rows),
        )


def test_text_needs_no_chat_template(tmp_path):
    trainer_for("none", tmp_path, processing_class=tiny_tokenizer("none")).train()


# Classes in the style of environment_factory.


class Guess:
    def reset(self, target=None, **row):
        assert "environment" not in row
        self.target = target
        return " Guess."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        return "right" if number == self.target else "wrong"

    def get_reward(self):
        return 0.25


class Silent:
    def reset(self, **row):
        self.row = row
        return " Speak."

    def speak(self, text: str) -> str:
        """Speak.

        Args:
            text: the words
        """
        return text


def by_target(completions, environments, answer, **row):
    """Rewards that only the environment's own object knows."""
    assert [type(one) for one in environments] == [Guess] * len(completions)
    assert [one.target for one in environments] == answer
    return [float(one.target) for one in environments]


@pytest.mark.parametrize("ahead", [False, True])
def test_reward_functions_see_the_environments(tmp_path, ahead):
    rows = [{"prompt": "Go.", "target": n, "answer": n} for n in range(8)]
    trainer = make_trainer(
        tmp_path,
        Guess,
        trainer={"train_dataset": Dataset.from_list(rows), "reward_funcs": by_target},
        enable_async_generation=ahead,
    )
    trainer.train()
    trainer.close()
    assert max(curve(trainer, "rewards/by_target/mean")) > 0
    assert not trainer.source.instances


def test_several_classes_by_name(tmp_path):
    rows = [
        {"prompt": "Go.", "environment": ("guess", "silent")[n % 2], "target": n} for n in range(8)
    ]
    names = {"guess": Guess, "silent": Silent}
    seen = []

    def score(completions, environments, environment, **row):
        seen.extend(
            (names[which], type(one)) for which, one in zip(environment, environments, strict=True)
        )
        return [1.0] * len(completions)

    trainer = make_trainer(
        tmp_path, names, trainer={"train_dataset": Dataset.from_list(rows), "reward_funcs": score}
    )
    assert trainer.multi_turn
    trainer.train()
    assert all(wanted is got for wanted, got in seen)
    assert len(set(seen)) == 2
    tools = {
        (e.task.payload["environment"], e.tools[0]["function"]["name"])
        for e in RunReader(tmp_path / "run").episodes(1) + RunReader(tmp_path / "run").episodes(2)
    }
    assert tools == {("guess", "guess"), ("silent", "speak")}


def test_several_classes_need_rows_that_name_them(tmp_path):
    names = {"guess": Guess}
    with pytest.raises(ValueError, match="needs a train_dataset whose column 'environment'"):
        make_trainer(tmp_path, names)
    rows = Dataset.from_list([{"prompt": "Go.", "environment": "chess"}])
    with pytest.raises(ValueError, match=r"env's classes \(guess\).*chess"):
        make_trainer(tmp_path, names, trainer={"train_dataset": rows})
    with pytest.raises(EnvError, match="is no environment"):
        make_trainer(tmp_path, {"guess": 3}, trainer={"train_dataset": rows})


def test_a_function_is_no_environment(tmp_path):
    def score(completions, **row):
        return [1.0] * len(completions)

    with pytest.raises(EnvError, match=r"env is a function \(score\).*reward_funcs"):
        make_trainer(tmp_path, score)


def test_all_names_can_be_imported_without_verl(monkeypatch):
    import turnwise.trainers

    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "verl" else find(name)
        )
        importlib.reload(turnwise.trainers)
        names = {}
        exec("from turnwise.trainers import *", names)
    importlib.reload(turnwise.trainers)
    assert "VerifiersGRPOTrainer" in names
    assert "AgentTrainer" not in names
    assert "AgentTrainer" in dir(turnwise.trainers)
