"""A conversation that another library drives, turned inside out. Without verifiers itself."""

import asyncio
from contextlib import suppress

import pytest

from turnwise.envs.base import EnvError
from turnwise.integrations.verifiers.exchange import ExchangeTurns, Outcome
from turnwise.types import Message, Task

TASK = Task(id="t", seed=0)
OPENING = {"role": "user", "content": "Begin."}
MORE = {"role": "user", "content": "More."}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}


def done(**changes):
    return Outcome(**{"reward": 1.0, "parts": {}, "metrics": {}, **changes})


def turns(play):
    return ExchangeTurns(lambda task: play, name="talk", limit=None)


def say(env, text):
    return env.step(Message(role="assistant", content=text))


def said(text):
    return {"role": "assistant", "content": text}


def two_questions(second, tools=()):
    """An environment that asks twice: its opening, then `second` of the first reply."""

    async def play(exchange):
        reply = await exchange.ask([OPENING], [])
        await exchange.ask(second(reply.content), list(tools))
        return done()

    env = turns(play)
    env.reset(TASK)
    return say(env, "hi")


def test_what_continues_is_added():
    result = two_questions(lambda reply: [OPENING, said(reply), MORE])
    assert result.rewritten is None
    assert [m.content for m in result.messages] == ["More."]


@pytest.mark.parametrize(
    "second",
    [
        lambda reply: [{"role": "user", "content": "BEGIN."}, said(reply), MORE],
        lambda reply: [OPENING, said(reply.upper()), MORE],
        lambda reply: [MORE],
        lambda reply: [OPENING, MORE],
        lambda reply: [OPENING, said(reply), MORE, said("I said this."), MORE],
    ],
    ids=["an earlier message", "the reply", "all of it", "without the reply", "for the model"],
)
def test_what_was_rewritten_is_shown_whole(second):
    result = two_questions(second)
    assert [m.to_json() for m in result.rewritten.messages] == second("hi")
    assert [m.content for m in result.messages][-1] == "More."
    assert all(m.role == "user" for m in result.messages)


def test_other_tools_are_another_context():
    result = two_questions(lambda reply: [OPENING, said(reply), MORE], tools=[LOOK])
    assert result.rewritten.tools == (LOOK,)


def test_questions_asked_side_by_side_are_answered_one_by_one():
    async def play(exchange):
        one, two = await asyncio.gather(
            exchange.ask([OPENING], [], {"seat": "a"}), exchange.ask([MORE], [], {"seat": "b"})
        )
        return done(metrics={"right": float((one.content, two.content) == ("1", "2"))})

    env = turns(play)
    assert env.reset(TASK).messages[0].content == "Begin."
    first = say(env, "1")
    assert first.info == {"seat": "a"}
    assert [m.content for m in first.rewritten.messages] == ["More."]
    last = say(env, "2")
    assert last.info["seat"] == "b"
    assert last.info["metrics"] == {"right": 1.0}


def test_a_cut_answers_all_further_questions():
    async def play(exchange):
        cuts = 0
        for _ in range(3):
            try:
                await exchange.ask([OPENING], [])
            except Exception:
                cuts += 1
        return done(reward=float(cuts))

    env = turns(play)
    env.reset(TASK)
    assert env.finish().reward == 3.0


def test_one_that_never_stops_asking_is_an_error():
    async def play(exchange):
        while True:
            with suppress(Exception):
                await exchange.ask([OPENING], [])

    env = turns(play)
    env.reset(TASK)
    with pytest.raises(EnvError, match="after the episode was cut"):
        env.finish()
    env.close()
