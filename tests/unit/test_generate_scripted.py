"""ScriptedGenerator and the tiny tokenizers that tests stand on."""

import asyncio

import pytest

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.testing.tiny import tiny_tokenizer

A = Session(key="a", seed=1)
FOUR = Sampling(max_tokens=4)


def test_the_script_sees_everything_that_the_session_holds():
    seen: list[tuple[tuple[int, ...], int]] = []

    def script(session: Session, ids: tuple[int, ...], call: int) -> list[int]:
        seen.append((ids, call))
        return [90 + call, 2]

    generator = ScriptedGenerator(script, logprob=lambda session, position: -0.1 * position)

    async def main() -> None:
        first = await generator.generate(A, [1, 2], FOUR)
        assert (first.ids, first.finish_reason) == ((90, 2), "stop")
        assert first.logprobs == pytest.approx((-0.2, -0.3))
        await generator.generate(A, [3], FOUR)
        assert generator.open_sessions == ("a",)
        await generator.release(A)
        await generator.release(A)

    asyncio.run(main())
    assert seen == [((1, 2), 0), ((1, 2, 90, 2, 3), 1)]
    assert (generator.open_sessions, generator.num_calls, generator.num_released) == ((), 2, 1)


def test_text_is_encoded_and_cut_by_limits():
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(
        lambda s, ids, call: "hello", tokenizer=tokenizer, end_id=258, max_context=8
    )
    whole = asyncio.run(generator.generate(A, [1, 1], Sampling(max_tokens=9)))
    assert (tokenizer.decode(whole.ids), whole.finish_reason) == ("hello<|im_end|>", "stop")
    with pytest.raises(ContextOverflowError, match="at most 8"):
        asyncio.run(generator.generate(A, [1], FOUR))
    cut = asyncio.run(generator.generate(Session(key="b", seed=1), [1, 1], FOUR))
    assert (tokenizer.decode(cut.ids), cut.finish_reason) == ("hell", "length")
    no_tokenizer = ScriptedGenerator(lambda s, ids, call: "hello")
    with pytest.raises(GeneratorError, match="tokenizer"):
        asyncio.run(no_tokenizer.generate(A, [1], FOUR))


def test_misuse_is_an_error_at_once():
    generator = ScriptedGenerator(lambda s, ids, call: [7], latency=0.01)

    async def twice() -> None:
        await asyncio.gather(generator.generate(A, [1], FOUR), generator.generate(A, [1], FOUR))

    with pytest.raises(GeneratorError, match="once at a time"):
        asyncio.run(twice())
    with pytest.raises(GeneratorError, match="has seed 1, got 5"):
        asyncio.run(generator.generate(Session(key="a", seed=5), [1], FOUR))
    for new_ids in ([], [-1]):
        with pytest.raises(GeneratorError):
            asyncio.run(generator.generate(Session(key="new", seed=5), new_ids, FOUR))
    with pytest.raises(GeneratorError, match="never empty"):
        asyncio.run(ScriptedGenerator(lambda s, ids, call: []).generate(A, [1], FOUR))


def test_latency_and_failures_come_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    generator = ScriptedGenerator(
        lambda s, ids, call: [7],
        latency=lambda s, call: 60.0 * call,
        fail=lambda s, call: GeneratorError("gone") if call == 1 else None,
    )
    asyncio.run(generator.generate(A, [1], FOUR))
    with pytest.raises(GeneratorError, match="gone"):
        asyncio.run(generator.generate(A, [1], FOUR))
    assert slept == [0.0, 60.0]
    generator.weights_updated(3)
    assert asyncio.run(generator.generate(Session(key="b", seed=0), [1], FOUR)).policy_version == 3


def test_one_template_appends_and_the_other_rewrites():
    turns = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "<think>hm</think>\na1"},
        {"role": "user", "content": "q2"},
    ]
    for name, appends in (("chatml", True), ("rewriting", False)):
        tokenizer = tiny_tokenizer(name)
        short, long = (tokenizer.apply_chat_template(turns[:n], tokenize=False) for n in (2, 3))
        assert long.startswith(short) == appends
    with pytest.raises(ValueError, match="template"):
        tiny_tokenizer("none").apply_chat_template(turns, tokenize=False)
