"""What test_verifiers_legacy.py runs with verifiers 0.3.1."""

import sys
from pathlib import Path

import pytest
import torch
import verifiers as vf
from datasets import Dataset
from trl_parts import curve, make_trainer

from turnwise.envs.base import EnvError
from turnwise.integrations.trl.credit import completion_messages
from turnwise.integrations.trl.detect import examine
from turnwise.integrations.trl.rewards import EnvironmentRewardAdapter
from turnwise.integrations.trl.sources import make_source
from turnwise.log.store import RunReader
from turnwise.types import Message

torch.set_num_threads(1)
folder = Path(sys.argv[1])
rows = Dataset.from_list([{"question": f"Guess {n}.", "answer": str(n)} for n in range(8)])


def right(completion, answer, **kwargs) -> float:
    said = [m["content"] if isinstance(m, dict) else m.content for m in completion]
    return float(any(answer == (text or "").strip() for text in said))


class Higher(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content.strip() == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "You won."}]
        return [{"role": "user", "content": "Try again."}]


class Subclass(vf.SingleTurnEnv):
    pass


def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: the number
    """
    return 2 * x


def say(env, text):
    return env.step(Message(role="assistant", content=text))


multi = Higher(dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=3, system_prompt="Play.")
assert examine(multi).multi_turn
assert not examine(Subclass(dataset=rows, rubric=vf.Rubric(funcs=[right]))).multi_turn
source = make_source(multi)
env = source.factory()
opening = env.reset(source.task("train", 5))
assert [m.content for m in opening.messages] == ["Play.", "Guess 5."]
first = say(env, "4")
assert [m.content for m in first.messages] == ["Try again."]
second = say(env, "5")
assert second.terminated, second
assert second.reward == 1.0
assert [m.content for m in second.messages] == ["You won."]
env.reset(source.task("train", 5))
assert say(env, "5").reward == 1.0
env.reset(source.task("train", 6))
say(env, "6 not")
cut = env.finish()
assert cut.truncated
assert cut.reward == 0.0
print("ok protocol")

tools = vf.ToolEnv(tools=[double], dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=3)
assert examine(tools).multi_turn
source = make_source(tools)
env = source.factory()
opening = env.reset(source.task("train", 2))
assert opening.tools[0]["function"]["name"] == "double"
result = say(env, '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>')
assert [m.content for m in result.messages] == ["42"]
assert say(env, "2").reward == 1.0
print("ok tools")


class Broken(Higher):
    async def env_response(self, messages, state, **kwargs):
        raise vf.Error("broken on purpose")


source = make_source(Broken(dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=3))
env = source.factory()
env.reset(source.task("train", 1))
with pytest.raises(EnvError, match="broken on purpose"):
    say(env, "7")
print("ok error")


class Forgets(Higher):
    """Shortens what it said before to one word, from the second turn on."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if not state["trajectory"]:
            return messages
        return [vf.UserMessage(content="Short."), *messages[1:]]


forgets = Forgets(dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=3)
source = make_source(forgets)
env = source.factory()
env.reset(source.task("train", 1))
first = say(env, "7")
assert [m.content for m in first.messages] == ["Try again."]
assert [m.content for m in first.rewritten.messages] == ["Short.", "7", "Try again."]
second = say(env, "8")
assert second.rewritten is None
assert [m.content for m in second.messages] == ["Try again."]
assert say(env, "1").reward == 1.0
print("ok rewritten")

called = vf.ToolEnv(tools=[double], dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=4)
ask_again = called.get_prompt_messages


async def shortened(state):
    messages = await ask_again(state)
    return [vf.UserMessage(content="Short."), *messages[1:]] if state["trajectory"] else messages


called.get_prompt_messages = shortened
source = make_source(called)
env = source.factory()
env.reset(source.task("train", 2))
call = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
opening, reply, answer = say(env, call).rewritten.messages
assert (reply.content, reply.tool_calls) == (call, ())  # the call stands in the text, once
assert answer.content == "42"
print("ok rewritten call")


def first_digit(completion, **kwargs) -> float:
    return 10.0


def rank(completions, **kwargs) -> list[float]:
    """The position of each among the lengths of its group."""
    sizes = [sum(len(message["content"] or "") for message in one) for one in completions]
    return [float(sum(other < size for other in sizes)) for size in sizes]


for name, make in [("alone", vf.SingleTurnEnv), ("turns", Higher)]:
    compared = make(dataset=rows, rubric=vf.Rubric(funcs=[rank, first_digit], weights=[1.0, 0.1]))
    assert examine(compared).multi_turn
    with pytest.raises(EnvError, match="scores the episodes of a group together"):
        EnvironmentRewardAdapter(make_source(compared))
    trainer = make_trainer(folder / name, compared, max_completion_length=60, max_turns=2)
    trainer.train()
    trainer.close()
    run = RunReader(folder / name / "run")
    groups = {}
    for step in run.steps():
        for episode in run.episodes(step):
            assert "rank" in episode.turns[-1].info["metrics"]
            size = len("".join(m["content"] for m in completion_messages(episode)))
            groups.setdefault((step, episode.group_id), []).append((size, episode.reward))
    assert len(groups) == 4
    for members in groups.values():
        expected = [1.0 + sum(other < size for other, _ in members) for size, _ in members]
        assert [reward for _, reward in members] == expected, members
    print("ok group", name, curve(trainer))

picture = {"type": "image_url", "image_url": {"url": "data:,"}}
seen = Dataset.from_list([{"prompt": [{"role": "user", "content": [picture]}], "answer": "1"}])
with pytest.raises(EnvError, match="a part of type 'image_url'"):
    make_source(vf.SingleTurnEnv(dataset=seen, rubric=vf.Rubric(funcs=[right])))
print("ok images")

for name, chosen, settings in [
    ("multi", multi, {}),
    ("forgets", forgets, {}),
    ("ahead", multi, {"enable_async_generation": True}),
    ("tools", tools, {"max_completion_length": 200}),
]:
    trainer = make_trainer(
        folder / name,
        chosen,
        max_completion_length=settings.pop("max_completion_length", 120),
        **settings,
    )
    trainer.train()
    trainer.close()
    assert curve(trainer, "rollout/failures") == [0.0, 0.0]
    assert curve(trainer, "rollout/contexts") == [2.0 if name == "forgets" else 1.0] * 2
    print("ok", name, curve(trainer, "rollout/turns"))

single = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))
trainer = make_trainer(folder / "single", single, max_completion_length=6)
assert not trainer.multi_turn
trainer.train()
print("ok single", curve(trainer))
