"""Tasksets of verifiers 0.4, in process: their rollout and scoring, our tokens."""

import sys
from types import SimpleNamespace

import pytest

vf = pytest.importorskip("verifiers.v1")

from turnwise.integrations.trl.sources import make_source  # noqa: E402
from turnwise.integrations.verifiers.environments import TasksetEnv  # noqa: E402
from turnwise.types import Message  # noqa: E402

pytestmark = pytest.mark.timeout(240)


class GuessData(vf.TaskData):
    target: int = 0


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def won(self, trace) -> float:
        return float(
            any(
                f"{self.data.target}" == (m.content or "").strip() for m in trace.assistant_messages
            )
        )

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return 1.0 / max(len(trace.assistant_messages), 1)

    @vf.metric
    async def replies(self, trace) -> float:
        return float(len(trace.assistant_messages))


class Guess(vf.Taskset[GuessTask]):
    def load(self):
        for target in range(4):
            yield GuessTask(
                GuessData(prompt="Guess the number.", system_prompt="Be brief.", target=target)
            )


def guess_set():
    return Guess(vf.TasksetConfig(id="guess"))


def user(messages, data):
    last = messages[-1]["content"].strip()
    return None if last == str(data.target) else "Wrong, again."


def say(env, text):
    return env.step(Message(role="assistant", content=text))


def test_a_conversation_with_a_user():
    source = make_source(TasksetEnv(guess_set(), user=user, max_turns=4))
    assert source.length("train") == 4
    env = source.factory()
    opening = env.reset(source.task("train", 2))
    assert [(m.role, m.content) for m in opening.messages] == [
        ("system", "Be brief."),
        ("user", "Guess the number."),
    ]
    first = say(env, "7")
    assert [m.content for m in first.messages] == ["Wrong, again."]
    assert not first.done
    second = say(env, "2")
    assert second.terminated
    assert second.reward == pytest.approx(1.0 + 0.5 / 2)
    assert second.info["metrics"]["replies"] == 2.0
    env.close()


def test_a_plain_taskset_ends_with_the_first_reply():
    source = make_source(guess_set())
    env = source.factory()
    env.reset(source.task("train", 3))
    result = say(env, "3")
    assert result.terminated
    assert result.reward == pytest.approx(1.5)


def test_tools_run_in_process():
    def look(trace, place: str) -> str:
        """Looks somewhere."""
        return f"nothing at {place} after {len(trace.assistant_messages)}"

    source = make_source(TasksetEnv(guess_set(), tools=[look]))
    env = source.factory()
    opening = env.reset(source.task("train", 1))
    assert opening.tools[0]["function"]["name"] == "look"
    result = say(env, '<tool_call>{"name": "look", "arguments": {"place": "home"}}</tool_call>')
    assert [m.content for m in result.messages] == ["nothing at home after 1"]
    assert say(env, "1").reward == pytest.approx(1.25)


def test_a_cut_episode_is_scored_as_it_stands():
    source = make_source(TasksetEnv(guess_set(), user=user))
    env = source.factory()
    env.reset(source.task("train", 2))
    say(env, "7")
    result = env.finish()
    assert result.truncated
    assert result.reward == pytest.approx(0.5)


def test_the_turn_limit_is_a_truncation():
    source = make_source(TasksetEnv(guess_set(), user=user, max_turns=2))
    env = source.factory()
    env.reset(source.task("train", 2))
    say(env, "7")
    result = say(env, "8")
    assert result.truncated
    assert not result.terminated


def test_a_user_that_raises_is_an_error_of_the_environment():
    def broken(messages, data):
        raise RuntimeError("the user left")

    source = make_source(TasksetEnv(guess_set(), user=broken))
    env = source.factory()
    env.reset(source.task("train", 2))
    with pytest.raises(Exception, match="the user left"):
        say(env, "7")


@pytest.mark.parametrize("ahead", [False, True])
def test_training(tmp_path, ahead):
    pytest.importorskip("trl")
    from trl_parts import curve, make_trainer

    env = TasksetEnv(guess_set(), user=user, max_turns=3)
    trainer = make_trainer(
        tmp_path, env, max_steps=2, enable_async_generation=ahead, max_completion_length=128
    )
    trainer.train()
    trainer.close()
    assert curve(trainer, "rollout/turns")[0] > 1
    assert curve(trainer, "rollout/failures") == [0.0, 0.0]


def test_the_page_trains_on_a_package(tmp_path, monkeypatch):
    """The block of docs/verifiers.md, with tasks of ours in place of the package of the hub."""
    pytest.importorskip("trl")
    from trl_parts import curve, make_args, page_blocks, save_model

    monkeypatch.setitem(sys.modules, "gsm8k", SimpleNamespace(GSM8KTaskset=Guess))
    (block,) = page_blocks("verifiers.md", __file__)
    args = make_args(tmp_path / "run", max_steps=1, max_completion_length=12)
    names = {"model": save_model(tmp_path / "model"), "args": args}
    exec(block, names)
    names["trainer"].train()
    assert len(curve(names["trainer"])) == 1
