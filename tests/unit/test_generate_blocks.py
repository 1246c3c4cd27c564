"""The block engine on the CPU: the logic of slots, packing, refill and stops, without the kernels."""

import asyncio

import pytest
import torch

from turnwise.generate.base import GeneratorError, Sampling, Session
from turnwise.generate.blocks.engine import PREFILL_BLOCK, Prefill, _pack
from turnwise.generate.hf import HFGenerator
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.types import Completion

KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")


def make(kind: str = "llama", *, slots: int = 3, max_context: int = 200, **options) -> HFGenerator:
    return HFGenerator(
        tiny_model(kind),
        tiny_tokenizer(),
        slots=slots,
        max_context=max_context,
        engine="blocks",
        block_steps=5,
        **options,
    )


def greedy(model, ids: list[int], *, tokens: int) -> tuple[int, ...]:
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, pad_token_id=256, eos_token_id=258
    )
    return tuple(out[0, len(ids) :].tolist())


async def talk(generator: HFGenerator, name: int, *, turns: int, sampling: Sampling) -> list[Completion]:
    session = Session(key=f"s{name}", seed=name)
    said: list[Completion] = []
    for turn in range(turns):
        new = [(7 * name + 3 * turn + i) % 250 for i in range(3 + 11 * (name % 3))]
        said.append(await generator.generate(session, new, sampling))
    await generator.release(session)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_over_turns(kind: str) -> None:
    generator = make(kind)

    async def run() -> None:
        async def one(name: int) -> None:
            session = Session(key=str(name), seed=name)
            held: list[int] = []
            for turn in range(3):
                new = [(31 * name + 17 * turn + i) % 250 for i in range(5 + 20 * name)]
                held += new
                reply = await generator.generate(session, new, Sampling(max_tokens=9, temperature=0.0))
                assert reply.ids == greedy(generator._model, held, tokens=9)
                held += reply.ids

        await asyncio.gather(*(one(name) for name in range(3)))

    asyncio.run(run())


def test_same_tokens_as_the_slot_engine_and_whatever_shares_the_batch() -> None:
    sampling = Sampling(max_tokens=12, temperature=0.9)

    async def run(generator: HFGenerator, names: list[int]) -> dict[int, list[Completion]]:
        said = await asyncio.gather(*(talk(generator, name, turns=3, sampling=sampling) for name in names))
        return dict(zip(names, said, strict=True))

    slots = HFGenerator(tiny_model(), tiny_tokenizer(), slots=3, max_context=200, engine="slots")
    expected = asyncio.run(run(slots, [0, 1, 2]))
    together = asyncio.run(run(make(), [2, 1, 0]))
    crowded = asyncio.run(run(make(slots=2), [0, 1, 2]))  # one session more than slots: eviction and return
    for name in range(3):
        for left, right, third in zip(expected[name], together[name], crowded[name], strict=True):
            assert left.ids == right.ids == third.ids
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)


def test_finished_slots_are_refilled_and_everything_is_released() -> None:
    generator = make(slots=2)

    async def run() -> None:
        jobs = (talk(generator, name, turns=2, sampling=Sampling(max_tokens=1 + 5 * (name % 4))) for name in range(9))
        for name, said in enumerate(await asyncio.gather(*jobs)):
            assert all(len(reply.ids) <= 1 + 5 * (name % 4) for reply in said)

    asyncio.run(run())
    assert generator.open_sessions == ()
    assert generator.stats.completions == 18
    assert not generator._blocks._live


def test_stop_strings_and_extra_stop_ids_cut_inside_a_block() -> None:
    generator = make()
    session = Session(key="a", seed=3)

    async def reply(sampling: Sampling, key: str) -> Completion:
        return await generator.generate(Session(key=key, seed=3), [1, 2, 3], sampling)

    free = asyncio.run(reply(Sampling(max_tokens=20), "free"))
    third = free.ids[2]
    first = free.ids.index(third)
    cut = asyncio.run(reply(Sampling(max_tokens=20, stop_ids=(third,)), "cut"))
    assert cut.ids == free.ids[: first + 1]
    assert cut.finish_reason == "stop"
    # The session goes on from where it was cut, not from what the block drew beyond it.
    model = generator._model
    again = asyncio.run(generator.generate(Session(key="cut", seed=3), [9], Sampling(max_tokens=4, temperature=0.0)))
    assert again.ids == greedy(model, [1, 2, 3, *cut.ids, 9], tokens=4)
    assert session.key not in generator.open_sessions


def test_top_k_is_honoured_and_its_log_probs_are_of_the_truncated_distribution() -> None:
    one = asyncio.run(make().generate(Session(key="a", seed=1), [1, 2], Sampling(max_tokens=5, top_k=1)))
    best = asyncio.run(make().generate(Session(key="a", seed=1), [1, 2], Sampling(max_tokens=5, temperature=0.0)))
    assert one.ids == best.ids
    assert one.logprobs == pytest.approx([0.0] * len(one.ids), abs=1e-6)


def test_cancelled_request_leaves_the_session_as_it_was() -> None:
    generator = make()
    session = Session(key="a", seed=1)

    async def run() -> Completion:
        first = await generator.generate(session, [1, 2, 3], Sampling(max_tokens=3, temperature=0.0))
        job = asyncio.create_task(generator.generate(session, [4, 5], Sampling(max_tokens=90)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        second = await generator.generate(session, [6], Sampling(max_tokens=4, temperature=0.0))
        assert second.ids == greedy(generator._model, [1, 2, 3, *first.ids, 6], tokens=4)
        return second

    asyncio.run(run())


def test_broken_weights_fail_the_request_and_not_the_generator() -> None:
    generator = make()
    weight = generator._model.lm_head.weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(GeneratorError, match="not finite"):
        asyncio.run(generator.generate(Session(key="a", seed=1), [1, 2], Sampling(max_tokens=5)))
    with torch.no_grad():
        weight.copy_(saved)
    generator.weights_updated(1)
    good = asyncio.run(generator.generate(Session(key="b", seed=1), [1, 2], Sampling(max_tokens=5)))
    assert good.policy_version == 1


def test_cache_is_given_back_and_sessions_survive_it() -> None:
    generator = make()
    session = Session(key="a", seed=1)
    greedy_five = Sampling(max_tokens=5, temperature=0.0)
    first = asyncio.run(generator.generate(session, [1, 2, 3], greedy_five))
    assert generator.cache_bytes > 0
    generator.free_cache()
    assert generator.cache_bytes == 0
    second = asyncio.run(generator.generate(session, [4], greedy_five))
    assert second.ids == greedy(generator._model, [1, 2, 3, *first.ids, 4], tokens=5)


def test_long_prompts_are_cut_into_passes_in_order() -> None:
    items = [
        Prefill(slot=0, start=5, ids=list(range(70)), final=True),
        Prefill(slot=1, start=0, ids=list(range(20)), final=True),
    ]
    parts = _pack(items, 64)
    assert [[(i.slot, i.start, len(i.ids), i.final) for i in part] for part in parts] == [
        [(0, 5, 64, False)],
        [(0, 69, 6, True), (1, 0, 20, True)],
    ]
    assert all(sum(-(-len(i.ids) // PREFILL_BLOCK) * PREFILL_BLOCK for i in part) <= 64 for part in parts)
