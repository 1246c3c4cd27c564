"""The block engine on the CPU: the logic of slots, packing, refill and stops, without the
kernels."""

import asyncio

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.generate.base import GeneratorError, Sampling, Session
from turnwise.generate.blocks.fused import FusedModel
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
        torch.tensor([ids]),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=256,
        eos_token_id=258,
    )
    return tuple(out[0, len(ids) :].tolist())


async def talk(
    generator: HFGenerator, name: int, *, turns: int, sampling: Sampling
) -> list[Completion]:
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
                reply = await generator.generate(
                    session, new, Sampling(max_tokens=9, temperature=0.0)
                )
                assert reply.ids == greedy(generator._model, held, tokens=9)
                held += reply.ids

        await asyncio.gather(*(one(name) for name in range(3)))

    asyncio.run(run())


def test_same_tokens_as_the_slot_engine_and_whatever_shares_the_batch() -> None:
    sampling = Sampling(max_tokens=12, temperature=0.9)

    async def run(generator: HFGenerator, names: list[int]) -> dict[int, list[Completion]]:
        said = await asyncio.gather(
            *(talk(generator, name, turns=3, sampling=sampling) for name in names)
        )
        return dict(zip(names, said, strict=True))

    slots = HFGenerator(tiny_model(), tiny_tokenizer(), slots=3, max_context=200, engine="slots")
    expected = asyncio.run(run(slots, [0, 1, 2]))
    together = asyncio.run(run(make(), [2, 1, 0]))
    # One session more than slots: eviction and return.
    crowded = asyncio.run(run(make(slots=2), [0, 1, 2]))
    for name in range(3):
        for left, right, third in zip(expected[name], together[name], crowded[name], strict=True):
            assert left.ids == right.ids == third.ids
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)


def test_finished_slots_are_refilled_and_everything_is_released() -> None:
    generator = make(slots=2)

    async def run() -> None:
        jobs = (
            talk(generator, name, turns=2, sampling=Sampling(max_tokens=1 + 5 * (name % 4)))
            for name in range(9)
        )
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
    again = asyncio.run(
        generator.generate(Session(key="cut", seed=3), [9], Sampling(max_tokens=4, temperature=0.0))
    )
    assert again.ids == greedy(model, [1, 2, 3, *cut.ids, 9], tokens=4)
    assert session.key not in generator.open_sessions


def test_top_k_is_honoured_and_its_log_probs_are_of_the_truncated_distribution() -> None:
    one = asyncio.run(
        make().generate(Session(key="a", seed=1), [1, 2], Sampling(max_tokens=5, top_k=1))
    )
    best = asyncio.run(
        make().generate(Session(key="a", seed=1), [1, 2], Sampling(max_tokens=5, temperature=0.0))
    )
    assert one.ids == best.ids
    assert one.logprobs == pytest.approx([0.0] * len(one.ids), abs=1e-6)


def test_cancelled_request_leaves_the_session_as_it_was() -> None:
    generator = make()
    session = Session(key="a", seed=1)

    async def run() -> Completion:
        first = await generator.generate(
            session, [1, 2, 3], Sampling(max_tokens=3, temperature=0.0)
        )
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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_joined_weights_stay_the_models_own(kind: str, tmp_path) -> None:
    model = tiny_model(kind)
    ids = torch.arange(12)[None]
    names = [name for name, _ in model.named_parameters()]
    before = model(ids).logits
    parameters = dict(model.named_parameters())
    generator = HFGenerator(model, tiny_tokenizer(), slots=2, max_context=64, engine="blocks")
    assert generator._blocks.engine._fused is not None
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert torch.equal(model(ids).logits, before)
    model(ids, labels=ids).loss.backward()  # and they still learn
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    generator.weights_updated(1)
    reply = asyncio.run(
        generator.generate(
            Session(key="a", seed=1), [1, 2, 3], Sampling(max_tokens=9, temperature=0.0)
        )
    )
    assert reply.ids == greedy(model, [1, 2, 3], tokens=9)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert [name for name, _ in again.named_parameters()] == names
    assert torch.equal(again(ids).logits, model(ids).logits)
    second = FusedModel.of(model, length=8)  # a second generator finds them joined
    first = generator._blocks.engine._fused
    assert [layer.qkv.weight.data_ptr() for layer in second.layers] == [
        layer.qkv.weight.data_ptr() for layer in first.layers
    ]


def test_models_outside_the_family_or_with_adapters_take_the_general_pass() -> None:
    assert make("gemma2")._blocks.engine._fused is None
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    assert FusedModel.of(model, length=8) is None


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_prompts_that_begin_alike_are_prefilled_once_and_drawn_apart(kind: str) -> None:
    system = [(7 * i) % 250 for i in range(40)]

    async def play(
        generator: HFGenerator, prompts: dict[str, list[int]], seed: int
    ) -> dict[str, list[Completion]]:
        async def one(key: str, prompt: list[int]) -> list[Completion]:
            session = Session(key=key, seed=seed + ord(key[-1]))
            said = [await generator.generate(session, prompt, Sampling(max_tokens=6))]
            said.append(await generator.generate(session, [5, 6], Sampling(max_tokens=6)))
            await generator.release(session)
            return said

        return dict(
            zip(
                prompts,
                await asyncio.gather(*(one(*item) for item in prompts.items())),
                strict=True,
            )
        )

    prompts = {f"g{n}m{m}": [*system, 100 + n] for n in range(3) for m in range(4)}
    shared = make(kind, slots=5)
    together = asyncio.run(play(shared, prompts, 3))
    alone: dict[str, list[Completion]] = {}
    single = make(kind, slots=5)
    for key, prompt in prompts.items():
        single._blocks._opening = None
        alone |= asyncio.run(play(single, {key: prompt}, 3))
    assert single.stats.shared_tokens == 0
    # Twins of the first wave, and the system prompt later.
    assert shared.stats.shared_tokens >= 41 * 3 + 40
    assert (
        shared.stats.prefilled_tokens + shared.stats.shared_tokens == single.stats.prefilled_tokens
    )
    for key in prompts:
        assert [reply.ids for reply in together[key]] == [reply.ids for reply in alone[key]]
    assert len({together[f"g0m{m}"][0].ids for m in range(4)}) > 1


def test_copies_never_come_from_a_slot_that_lost_its_session() -> None:
    generator = make(slots=1)
    prompt = [(3 * i) % 250 for i in range(50)]
    greedy_five = Sampling(max_tokens=5, temperature=0.0)

    async def run() -> None:
        first, second = Session(key="a", seed=1), Session(key="b", seed=1)
        said = await generator.generate(first, prompt, greedy_five)
        # Takes the only slot.
        other = await generator.generate(second, [*prompt[:-1], 9], greedy_five)
        assert other.ids == greedy(generator._model, [*prompt[:-1], 9], tokens=5)
        again = await generator.generate(first, [7], greedy_five)
        assert again.ids == greedy(generator._model, [*prompt, *said.ids, 7], tokens=5)

    asyncio.run(run())


@examples(12)
@given(data=st.data())
def test_shared_states_outlive_the_session_that_computed_them(data: st.DataObject) -> None:
    """Groups with long prompts, fewer slots than sessions, sessions that end or are cancelled at
    any time: whoever reads in another's slot reads what it would have computed itself."""
    slots = data.draw(st.integers(2, 5))
    # The length of each group's prompt.
    groups = data.draw(st.lists(st.integers(60, 150), min_size=1, max_size=3))
    members = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(groups) - 1), st.integers(1, 3)), min_size=2, max_size=7
        )
    )
    early = data.draw(st.sets(st.integers(0, len(members) - 1), max_size=2))

    async def play(generator: HFGenerator) -> dict[int, list[tuple[int, ...]]]:
        said: dict[int, list[tuple[int, ...]]] = {}

        async def one(number: int, group: int, turns: int) -> None:
            session = Session(key=f"m{number}", seed=number)
            said[number] = []
            new = [(13 * group + i) % 250 for i in range(groups[group])]
            for turn in range(turns):
                reply = await generator.generate(
                    session, new, Sampling(max_tokens=7, temperature=0.8)
                )
                said[number].append(reply.ids)
                new = [turn + 1, number % 250]
                if number in early:
                    break
                await asyncio.sleep(0)
            await generator.release(session)

        await asyncio.gather(*(one(number, *member) for number, member in enumerate(members)))
        return said

    # In float64: in float32 a draw now and then falls between two roundings, and the engines round
    # differently.
    common = {"tokenizer": tiny_tokenizer(), "max_context": 200}
    slow = HFGenerator(tiny_model().double(), slots=8, engine="slots", **common)
    quick = HFGenerator(
        tiny_model().double(), slots=slots, engine="blocks", block_steps=5, **common
    )
    assert asyncio.run(play(quick)) == asyncio.run(play(slow))


def test_a_slot_that_others_read_in_hands_over_before_it_is_overwritten() -> None:
    generator = make(slots=3)
    engine, moves = generator._blocks.engine, []
    launch = engine.launch

    def watched(**arguments):
        moves.extend(arguments["moves"])
        return launch(**arguments)

    engine.launch = watched
    prompt = [i % 250 for i in range(100)]

    async def run() -> tuple[tuple[int, ...], ...]:
        sampling = Sampling(max_tokens=6, temperature=0.8)
        sessions = [Session(key=f"a{number}", seed=number) for number in range(3)]
        first = await asyncio.gather(
            *(generator.generate(session, prompt, sampling) for session in sessions)
        )
        assert generator.stats.shared_tokens == 200
        await generator.release(sessions[0])  # the one whose states the others read
        other = await generator.generate(Session(key="b", seed=9), [7] * 80, sampling)
        again = await asyncio.gather(
            *(generator.generate(session, [5, 6], sampling) for session in sessions[1:])
        )
        return tuple(reply.ids for reply in (*first, other, *again))

    found = asyncio.run(run())
    assert [(move.source, move.target, move.last) for move in moves] == [(0, 1, 64)]
    generator = HFGenerator(
        tiny_model(), tiny_tokenizer(), slots=3, max_context=200, engine="blocks", block_steps=5
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnwise.generate.blocks.driver.TILE", 10_000)
        moves.clear()
        assert asyncio.run(run()) == found
    assert moves == []
