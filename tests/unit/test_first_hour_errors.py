"""Right to the user: progress, the line of the user's code, play, replay, evaluation."""

import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import warm

from turnwise.cli.main import main
from turnwise.config import run_config
from turnwise.config.schema import Config, FormatConfig
from turnwise.envs.gate import raised_at
from turnwise.evaluate.check_env import check_env
from turnwise.evaluate.evaluation import PROBES, EvalResult, compare, evaluate
from turnwise.evaluate.players import ScriptedPlayer, play_episodes
from turnwise.models.policy import load_model
from turnwise.models.source import ask_hub, model_source
from turnwise.procs.progress import Progress
from turnwise.types import Completion, Episode, Status, Task, Turn


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def test_work_that_hangs_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    written = threading.Event()

    class Seen(io.StringIO):
        def write(self, text: str) -> int:
            if "1 of 3" in text:
                written.set()
            return super().write(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Seen())
        with Progress("counting", total=3, first=0.01) as progress:
            progress.advance()
            assert written.wait(60)


def test_check_env_says_what_it_does_while_a_step_sleeps(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom turnwise import BaseEnv\n\n\nclass Slow(BaseEnv):\n"
        "    instruction = 'Wait.'\n    actions = ('wait', 'go')\n\n"
        "    def reset(self, seed=None):\n        return f'Number {seed}.'\n\n"
        "    def step(self, action):\n        time.sleep(600)\n"
    )
    words = ["check-env", "slow.py:Slow", "--rollout.step_timeout", "4"]
    done = subprocess.run([*warm.turnwise(), *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "... checking slow.py:Slow, seed: 1 of 10" in done.stderr
    assert "step took longer than 4 s; where it needs longer, raise rollout.step_timeout" in (
        done.stdout
    )


WITHOUT_TORCH = """
import os, sys, threading
from turnwise.cli.main import main

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
            print("loads torch", "and says so" if timers else "in silence", flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
main(sys.argv[1:])
"""


def started_without_torch(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a new process, which ends where torch would be imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train bandit model.path=/no/such/dir", "model.path: /no/such/dir does not exist"),
        ("train bandit log.name=taken", "choose another log.name"),
        ("train bandit log.dir=/dev/full", "log.dir=/dev/full: a run cannot be written there"),
        ("train bandit algo.name=grpo rollout.train.group_size=1", "compares the episodes"),
        ("train bandit model.path=/no/such/dir --dry-run", "does not exist"),
        ("train bandit algo.name=grpo rollout.train.group_size=1 --dry-run", "compares"),
        ("replay nothing.jsonl", "there is no file nothing.jsonl"),
        ("eval runs/none", "there is no run, checkpoint, model or config at runs/none"),
    ],
)
def test_a_mistake_is_refused_before_torch_is_loaded(words: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    done = started_without_torch(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    "words",
    ["train bandit", "push runs/a b", "play bandit", "eval bandit", "rollout bandit --out a.jsonl"],
)
def test_a_command_says_that_it_loads_libraries(words: str, tmp_path: Path) -> None:
    done = started_without_torch(*words.split(), cwd=tmp_path)
    assert done.stdout == "loads torch and says so\n", done.stderr


def test_an_error_is_told_with_the_users_line() -> None:
    def broken() -> None:
        re.compile("(")  # raised in a library, called from here

    with pytest.raises(re.error) as caught:
        broken()
    assert re.search(
        r"\(tests/.*test_first_hour_errors.py, line \d+\)|errors.py, line", raised_at(caught.value)
    )
    assert "sre" not in raised_at(caught.value)


def test_a_script_that_hangs_is_given_up_in_time() -> None:
    config = Config.model_validate(
        {"env": {"name": "bandit"}, "rollout": {"generate_timeout": 0.05, "retries": 0}}
    )
    forever = threading.Event()
    player = ScriptedPlayer("slow", lambda _: str(forever.wait(60)))
    episodes = play_episodes(config, player, episodes=2)
    forever.set()
    assert {episode.status for episode in episodes} == {Status.GENERATOR_ERROR}


@pytest.mark.parametrize(
    ("typed", "actions", "taken"),
    [
        ("1", ("1", "2", "3"), "1"),
        ("3", ("1", "2", "3"), "3"),
        ("0", ("up", "down"), "up"),
        ("down", ("up", "down"), "down"),
    ],
)
def test_play_takes_the_action_and_not_its_index(
    typed: str, actions: tuple[str, ...], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnwise.cli import play

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}\n"))
    asked = play._ask(actions, FormatConfig(style="raw", think=False), as_model=False)  # pyright: ignore[reportPrivateUsage]
    assert asked == taken


class Secret:
    """All seeds open alike; the number to guess differs."""

    instruction = "Guess."
    actions = ("1", "2", "3", "4")

    def reset(self, seed: int = 0) -> str:
        self.number = str(1 + seed % 4)
        return "Guess a number."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, bool]]:
        won = action == self.number
        return f"It was {self.number}.", float(won), True, {"success": won}


class Same(Secret):
    def reset(self, seed: int = 0) -> str:
        return super().reset(0)


def test_hidden_state_is_no_reason_for_a_warning() -> None:
    assert check_env(Secret).findings == ()
    (found, *_) = check_env(Same).findings
    assert "seeds open and go alike" in found.message


class Opened(Secret):
    """Two openings in both splits."""

    hides = True

    def reset(self, seed: int = 0) -> str:
        super().reset(seed if self.hides else 0)
        return f"Guess number {seed % 2}."


class Shown(Opened):
    hides = False


def test_shared_openings_are_told_only_where_the_rest_is_shared_too() -> None:
    assert check_env(Opened).findings == ()
    (found,) = check_env(Shown).findings
    assert "2 openings appear in train and val" in found.message


def episode(task: int, won: bool, index: int = 0) -> Episode:
    done = Completion(ids=(), logprobs=(), finish_reason="stop")
    turn = Turn(
        prompt_ids=(),
        completion=done,
        text="",
        restart=True,
        reward=float(won),
        info={"success": won},
    )
    return Episode(
        id=f"{task}-{index}",
        task=Task(id=str(task), seed=task),
        group_id=task,
        index=index,
        tag="",
        seed=0,
        noise_seed=0,
        prompt=(),
        turns=(turn,),
        status=Status.COMPLETED,
    )


def test_a_task_that_is_played_often_counts_once() -> None:
    once = EvalResult.of("a", [episode(n, n < 2) for n in range(4)])
    often = EvalResult.of("a", [episode(n, n < 2, i) for n in range(4) for i in range(50)])
    assert (often.tasks, len(often.outcomes)) == (4, 200)
    assert often.success == once.success
    assert often.reward == once.reward
    half = EvalResult.of("b", [episode(n, i < 25, i) for n in range(4) for i in range(50)])
    found = compare(often, half)
    assert (found.tasks, found.only_a, found.only_b) == (4, 2, 2)
    assert found.success is not None
    assert (found.success.estimate, found.p) == (0.0, 1.0)


def test_a_player_without_a_legal_reply_has_no_success() -> None:
    config = run_config(None, ["env.name=bandit", "rollout.isolation=inline", "env.max_turn=2"])
    bad = evaluate(config, ScriptedPlayer("bad", lambda situation: "no such arm"), episodes=4)
    assert {one.status for one in bad.episodes} == {Status.TRUNCATED_TURNS}
    assert bad.success is not None
    assert bad.success.estimate == 0.0


def test_a_run_asks_once_whether_an_environment_reports_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("endless.py").write_text(
        "class Env:\n    instruction = 'Go on.'\n    actions = ('a', 'b')\n"
        "    def reset(self, seed=0, split='train'):\n"
        "        open('resets', 'a').write(split + '\\n')\n        return f'Begin {seed}.'\n"
        "    def step(self, action):\n        return 'Go on.', 0.0, False, {}\n"
    )
    words = "train --env.name endless.py:Env env.max_turn=1 rollout.isolation=inline train.steps=2"
    words += " rollout.train.env_groups=1 eval.every=1 eval.episodes=2 eval.baselines=false"
    words += " model.embedded.warmstart_episodes=8 checkpoint.write=false"
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    summaries = Path("runs").glob("*/metrics.jsonl")
    evaluations = sum(text.read_text().count('"eval/reward"') for text in summaries)
    assert evaluations == 3
    assert Path("resets").read_text().count("val") == evaluations * 2 + PROBES


def test_two_seeds_that_draw_one_row_are_one_task(tmp_path: Path) -> None:
    (tmp_path / "quiz.py").write_text(
        "from turnwise import Rubric, SingleTurnEnv\n\n"
        "ROWS = [{'prompt': str(n)} for n in range(9)]\n\n\n"
        "def same(text, prompt):\n    return float(text == prompt)\n\n\n"
        "class Quiz(SingleTurnEnv):\n    def __init__(self):\n"
        "        super().__init__(ROWS, Rubric([same]), val_fraction=0.4)\n"
    )
    config = run_config(None, [f"env.name={tmp_path}/quiz.py:Quiz", "rollout.isolation=inline"])
    result = evaluate(config, ScriptedPlayer("same", lambda situation: "3"), episodes=32)
    assert len(result.outcomes) == 32
    assert result.tasks < 9


def test_a_mistyped_folder_is_told_without_the_hub(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        config = run_config(None, ["model.path=models/qwem"]).model
        with pytest.raises(ValueError, match="did you mean models/qwen"):
            model_source(config)
        assert model_source(config.model_copy(update={"path": "models/qwen"})) == "models/qwen"
        assert model_source(config.model_copy(update={"path": "owner/name"})) == "owner/name"


def test_a_folders_name_is_no_owner_on_the_hub_and_the_hub_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    config = run_config(None, ["model.path=models/nope"]).model
    with pytest.raises(ValueError, match="models/nope does not exist"):
        model_source(config)
    for name in ("owner/name", "owner"):
        unreachable = config.model_copy(update={"path": name})
        said = f"there is no folder {name} here, and the hub http://127.0.0.1:1 does not answer"
        with pytest.raises(ValueError, match=said):
            load_model(unreachable)
    (tmp_path / "cache" / "models--owner--name").mkdir(parents=True)
    ask_hub("owner/name")


@pytest.fixture(scope="module")
def prompt_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on twenty prompts, two of them held out."""
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("prompts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tiny_model("llama").save_pretrained("tiny")
        tiny_tokenizer().save_pretrained("tiny")
        rows = [f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(20)]
        Path("rows.jsonl").write_text("".join(rows))
        Path("reward.py").write_text(
            "def reward(prompt, completion, **columns):\n    return float(len(completion) % 3)\n"
        )
        words = "model.path=tiny data.prompts=rows.jsonl data.reward=reward.py:reward log.name=run"
        words += " train.steps=1 eval.episodes=8 algo.name=grpo rollout.max_response_tokens=8"
        words += " rollout.max_context=64 rollout.train.env_groups=4 rollout.train.group_size=2"
        assert run("train", *words.split()) == 0
    return folder


def test_replay_and_eval_of_a_run_on_prompts(
    prompt_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompt_run)
    assert run("replay", "runs/run/episodes/step_000001.jsonl") == 0
    assert "8 of 8 episodes gave the same result" in capfd.readouterr().out
    assert run("eval", "runs/run") == 0
    assert "over 8 episodes of only 2 tasks" in capfd.readouterr().out


def test_a_torn_checkpoint_is_named_and_the_untrained_one_refused(
    prompt_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompt_run)
    torn = Path("runs/run/checkpoints/step_000001/manifest.json")
    text = torn.read_text()
    torn.unlink()
    try:
        assert run("eval", "runs/run") == 2
        said = capfd.readouterr().err
        assert "step_000001 is incomplete" in said
        assert "to use it, name it: runs/run/checkpoints/step_000000" in said
        assert run("eval", "runs/run/checkpoints/step_000000", "--episodes", "2") == 0
    finally:
        torn.write_text(text)
