"""HFGenerator: equal to transformers' generate, sessions across turns, stops, limits, failures,
evictions."""

import asyncio
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.generate.hf import HFGenerator
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
GREEDY = Sampling(max_tokens=16, temperature=0.0)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=600))


def prompt(seed: int, size: int) -> list[int]:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(model: Any, ids: list[int], count: int, stop: int | None = 258) -> list[int]:
    """What transformers' own greedy generate says after the ids."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=256,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"num_kv_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma2", {"attn_implementation": "eager"}),
        ("gemma3", {}),
        ("mistral", {}),
        ("gpt2", {}),
    ],
)
def test_greedy_equals_transformers_generate_over_turns(
    kind: Any, options: dict[str, Any], deterministic: bool
):
    model = tiny_model(kind, **options)
    generator = HFGenerator(
        model,
        TOKENIZER,
        slots=3,
        max_context=256,
        deterministic=deterministic,
        prefill_chunk=32,
        prefill_tokens=64,
    )
    assert type(generator._passes).__name__ == "SlotPasses"

    async def play(index: int) -> None:
        session = Session(key=str(index), seed=index)
        held: list[int] = []
        for turn in range(2):
            new = prompt(10 * index + turn, 5 + 13 * index)
            completion = await generator.generate(session, new, GREEDY)
            held += new
            assert list(completion.ids) == reference(model, held, 16)
            held += completion.ids
        await generator.release(session)

    async def main() -> None:
        await asyncio.gather(*(play(index) for index in range(4)))

    run(main())
    assert generator.open_sessions == ()


def test_logprobs_are_those_of_a_plain_forward_pass():
    model = tiny_model("qwen3")
    generator = HFGenerator(model, TOKENIZER, slots=2, max_context=128)
    ids = prompt(0, 20)
    for temperature in (1.0, 0.7, 0.0):
        session = Session(key=str(temperature), seed=3)
        sampling = Sampling(max_tokens=16, temperature=temperature)
        completion = run(generator.generate(session, ids, sampling))
        with torch.no_grad():
            logits = model(torch.tensor([ids + list(completion.ids)])).logits[0, len(ids) - 1 : -1]
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        picked = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), picked, atol=1e-5, rtol=0)


def play_turns(
    generator: HFGenerator, key: str, seed: int, *, delay: int = 0, turns: int = 3
) -> Coroutine[Any, Any, Any]:
    """The ids and log-probs of a session of `turns` turns, started `delay` ticks of the event loop
    late."""

    async def play() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        for _ in range(delay):
            await asyncio.sleep(0)
        session, said = Session(key=key, seed=seed), []
        for turn in range(turns):
            completion = await generator.generate(
                session, prompt(seed + turn, 7 + 9 * turn), Sampling(max_tokens=12)
            )
            said.append((completion.ids, completion.logprobs))
            await asyncio.sleep(0)
        await generator.release(session)
        return said

    return play()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_a_session_has_the_same_bits_in_any_company(kind: Any):
    # Wide enough that a matrix product's bits depend on its shape: otherwise nothing here could
    # fail.
    options: dict[str, Any] = {"intermediate_size": 1536}
    options |= {"attn_implementation": "eager"} if kind == "gemma2" else {}
    model = tiny_model(kind, **options)

    def fresh(slots: int = 4) -> HFGenerator:
        return HFGenerator(
            model, TOKENIZER, slots=slots, max_context=300, prefill_chunk=16, prefill_tokens=64
        )

    alone = run(play_turns(fresh(), "me", 5))

    async def crowd(generator: HFGenerator, *, first: int, others: int) -> Any:
        mine = play_turns(generator, "me", 5, delay=first)
        rest = [
            play_turns(generator, f"o{i}", 100 + i, delay=3 * i, turns=4) for i in range(others)
        ]
        return (await asyncio.gather(mine, *rest))[0]

    for first, others in ((0, 3), (7, 3), (20, 2)):
        assert run(crowd(fresh(), first=first, others=others)) == alone
    # More sessions than slots: mine is evicted on the way, and comes back bit for bit.
    generator = fresh()
    assert run(crowd(generator, first=0, others=8)) == alone
    assert generator.stats.evictions > 0
    assert generator.stats.replayed_tokens > 0


def test_a_session_depends_on_its_seed_and_not_on_its_key():
    model = tiny_model()
    one, two, three = (
        run(play_turns(HFGenerator(model, TOKENIZER, slots=2, max_context=256), key, seed))
        for key, seed in (("a", 1), ("b", 1), ("a", 2))
    )
    assert one == two
    assert one != three


@pytest.mark.parametrize("deterministic", [True, False])
def test_eviction_changes_nothing_but_the_work(deterministic: bool):
    model = tiny_model()
    generator = HFGenerator(model, TOKENIZER, slots=1, max_context=200, deterministic=deterministic)

    async def main() -> None:
        held: dict[str, list[int]] = {"a": [], "b": []}
        for turn in range(3):
            for key in held:
                new = prompt(turn, 10)
                completion = await generator.generate(Session(key=key, seed=0), new, GREEDY)
                held[key] += new
                assert list(completion.ids) == reference(model, held[key], 16)
                held[key] += completion.ids

    run(main())
    assert generator.stats.evictions == 5


def test_prefilled_tokens_are_the_new_ones():
    generator = HFGenerator(tiny_model(), TOKENIZER, slots=2, max_context=512)
    session = Session(key="a", seed=0)

    async def main() -> None:
        for turn in range(6):
            await generator.generate(session, prompt(turn, 10), Sampling(max_tokens=8))

    run(main())
    # The last sampled id goes in with the next prompt.
    assert generator.stats.prefilled_tokens == 10 + 5 * 11
    assert generator.stats.replayed_tokens == 0


def test_stop_ids_and_stop_strings_end_a_completion_and_are_kept():
    model = tiny_model("qwen2")
    ids = prompt(1, 12)
    free = reference(model, ids, 24)
    generator = HFGenerator(model, TOKENIZER, slots=2, max_context=128)
    by_id = run(
        generator.generate(
            Session(key="a", seed=0),
            ids,
            Sampling(max_tokens=24, temperature=0.0, stop_ids=(free[5],)),
        )
    )
    end = free.index(free[5]) + 1
    assert (list(by_id.ids), by_id.finish_reason) == (free[:end], "stop")
    text = TOKENIZER.decode(free[7:9])
    by_text = run(
        generator.generate(
            Session(key="b", seed=0), ids, Sampling(max_tokens=24, temperature=0.0, stop=(text,))
        )
    )
    end = next(n for n in range(1, 25) if text in TOKENIZER.decode(free[:n]))
    assert (list(by_text.ids), by_text.finish_reason) == (free[:end], "stop")
    assert len(by_text.ids) < 24
    whole = run(
        generator.generate(Session(key="c", seed=0), ids, Sampling(max_tokens=3, temperature=0.0))
    )
    assert (len(whole.ids), whole.finish_reason) == (3, "length")


def test_end_of_turn_of_the_template_ends_a_reply():
    model = tiny_model(eos_token_id=None)
    model.generation_config.eos_token_id = [3, 4]
    assert HFGenerator(model, TOKENIZER, slots=1, max_context=16).stop_ids == {3, 4, 258}


def test_the_context_limit_shortens_then_refuses_and_loses_nothing():
    generator = HFGenerator(tiny_model(), TOKENIZER, slots=2, max_context=32, stop_ids=())
    session = Session(key="a", seed=1)
    short = run(generator.generate(session, prompt(0, 28), Sampling(max_tokens=50)))
    assert len(short.ids) <= 4
    with pytest.raises(ContextOverflowError, match="at most 32"):
        run(generator.generate(session, prompt(0, 4), Sampling(max_tokens=5)))
    with pytest.raises(ContextOverflowError):
        run(generator.generate(Session(key="b", seed=1), prompt(0, 32), Sampling(max_tokens=5)))
    assert generator.open_sessions == ("a",)
    full = run(generator.generate(Session(key="c", seed=2), prompt(0, 31), Sampling(max_tokens=5)))
    assert len(full.ids) == 1


def test_misuse_is_refused():
    generator = HFGenerator(tiny_model(), TOKENIZER, slots=2, max_context=64)
    session = Session(key="a", seed=1)
    with pytest.raises(GeneratorError, match=r"0\.\.258, got 5\.\.900"):
        run(generator.generate(session, [5, 900], Sampling(max_tokens=4)))
    with pytest.raises(GeneratorError, match="needs ids"):
        run(generator.generate(session, [], Sampling(max_tokens=4)))
    run(generator.generate(session, [1], Sampling(max_tokens=4)))
    with pytest.raises(GeneratorError, match="has seed 1, got 2"):
        run(generator.generate(Session(key="a", seed=2), [1], Sampling(max_tokens=4)))
    with pytest.raises(GeneratorError, match="max_tokens"):
        run(generator.generate(session, [1], Sampling(max_tokens=0)))

    async def twice() -> None:
        await asyncio.gather(
            *(generator.generate(session, [1], Sampling(max_tokens=4)) for _ in range(2))
        )

    with pytest.raises(GeneratorError, match="once at a time"):
        run(twice())
    with pytest.raises(ValueError, match="at most 4096 positions"):
        HFGenerator(tiny_model(), TOKENIZER, slots=1, max_context=5000)
    run(generator.release(Session(key="unknown", seed=0)))


def test_a_model_that_raises_fails_its_pass_and_nothing_else():
    model = tiny_model()
    generator = HFGenerator(model, TOKENIZER, slots=3, max_context=128)
    clean = run(play_turns(HFGenerator(model, TOKENIZER, slots=3, max_context=128), "me", 5))
    broken = {"on": False}

    def trip(module: Any, args: Any, kwargs: Any) -> None:
        if broken["on"] and kwargs["input_ids"].shape[1] > 16:
            raise RuntimeError("no memory")

    handle = model.register_forward_pre_hook(trip, with_kwargs=True)

    async def main() -> Any:
        mine = asyncio.create_task(play_turns(generator, "me", 5))
        await asyncio.sleep(0)
        broken["on"] = True
        bad = generator.generate(Session(key="bad", seed=0), prompt(0, 60), Sampling(max_tokens=4))
        with pytest.raises(GeneratorError, match="no memory"):
            await bad
        broken["on"] = False
        return await mine

    assert run(main()) == clean
    handle.remove()
    assert generator.open_sessions == ()
    assert run(play_turns(generator, "bad", 5)) == clean


def test_logits_that_are_not_finite_fail_their_own_row_only():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = float("nan")
    generator = HFGenerator(model, TOKENIZER, slots=2, max_context=64)

    async def main() -> Any:
        good = generator.generate(
            Session(key="good", seed=0), [1, 2, 3], Sampling(max_tokens=8, temperature=0.0)
        )
        bad = generator.generate(Session(key="bad", seed=0), [1, 200, 3], Sampling(max_tokens=8))
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = run(main())
    assert isinstance(bad, GeneratorError)
    assert "not finite" in str(bad)
    assert list(good.ids) == reference(model, [1, 2, 3], 8)
    for key in ("x", "y", "z"):  # every slot is clean again
        again = run(
            generator.generate(
                Session(key=key, seed=0), [1, 2, 3], Sampling(max_tokens=8, temperature=0.0)
            )
        )
        assert again.ids == good.ids


def test_cancelling_gives_the_slot_back_and_forgets_the_call():
    model = tiny_model("qwen2")
    generator = HFGenerator(model, TOKENIZER, slots=1, max_context=256)
    session = Session(key="a", seed=0)

    async def main() -> None:
        first = await generator.generate(session, [1, 2, 3], GREEDY)
        waiting = asyncio.create_task(generator.generate(session, [9, 9], Sampling(max_tokens=100)))
        queued = asyncio.create_task(
            generator.generate(Session(key="b", seed=0), [7], Sampling(max_tokens=100))
        )
        for _ in range(4):
            await asyncio.sleep(0)
        for task in (waiting, queued):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert generator.open_sessions == ("a",)
        held = [1, 2, 3, *first.ids, 4]
        after = await generator.generate(session, [4], GREEDY)
        assert list(after.ids) == reference(model, held, 16)
        other = await generator.generate(Session(key="c", seed=0), [1, 2, 3], GREEDY)
        assert other.ids == first.ids

    run(main())


def test_releasing_a_session_that_generates_fails_the_call():
    generator = HFGenerator(tiny_model(), TOKENIZER, slots=1, max_context=256)

    async def main() -> None:
        task = asyncio.create_task(
            generator.generate(Session(key="a", seed=0), [1], Sampling(max_tokens=100))
        )
        await asyncio.sleep(0)
        await generator.release(Session(key="a", seed=0))
        with pytest.raises(GeneratorError, match="released"):
            await task

    run(main())


def test_new_weights_are_used_for_the_whole_context():
    model = tiny_model("qwen2")
    generator = HFGenerator(model, TOKENIZER, slots=2, max_context=256)
    session = Session(key="a", seed=0)
    first = run(generator.generate(session, [1, 2, 3], GREEDY))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            )
    generator.weights_updated(7)
    second = run(generator.generate(session, [4, 5], GREEDY))
    assert list(second.ids) == reference(model, [1, 2, 3, *first.ids, 4, 5], 16)
    assert (first.policy_version, second.policy_version, generator.policy_version) == (0, 7, 7)


def test_the_cache_is_given_back_and_made_again():
    model = tiny_model()
    generator = HFGenerator(model, TOKENIZER, slots=2, max_context=256)
    session = Session(key="a", seed=0)
    first = run(generator.generate(session, [1, 2, 3], GREEDY))
    assert generator.cache_bytes > 0
    generator.free_cache()
    assert generator.cache_bytes == 0
    second = run(generator.generate(session, [4], GREEDY))
    assert list(second.ids) == reference(model, [1, 2, 3, *first.ids, 4], 16)


def test_weights_cannot_change_under_a_completion():
    generator = HFGenerator(tiny_model(), TOKENIZER, slots=1, max_context=256)

    async def main() -> None:
        task = asyncio.create_task(
            generator.generate(Session(key="a", seed=0), [1], Sampling(max_tokens=100))
        )
        await asyncio.sleep(0)
        with pytest.raises(GeneratorError, match="update the weights while"):
            generator.weights_updated(1)
        await task

    run(main())


def test_training_mode_attention_and_gradients_are_left_alone():
    model = tiny_model(attention_dropout=0.5)
    plain = HFGenerator(tiny_model(), TOKENIZER, slots=1, max_context=64)
    model.train()
    model.model.layers[0].eval()
    generator = HFGenerator(model, TOKENIZER, slots=1, max_context=64)
    said = run(generator.generate(Session(key="a", seed=0), [1, 2], GREEDY))
    assert said == run(plain.generate(Session(key="a", seed=0), [1, 2], GREEDY))
    assert model.training
    assert not model.model.layers[0].training
    assert model.config._attn_implementation == "sdpa"
    loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None


def test_a_recurrent_model_takes_the_slow_path_with_one_warning():
    import transformers

    config = transformers.MambaConfig(
        vocab_size=259,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        eos_token_id=258,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="recurrent") as caught:
        generator = HFGenerator(model, TOKENIZER, slots=2, max_context=64)
    assert len([w for w in caught if "recurrent" in str(w.message)]) == 1
    said = run(
        generator.generate(
            Session(key="a", seed=0), [1, 2, 3], Sampling(max_tokens=6, temperature=0.0)
        )
    )
    assert list(said.ids) == reference(model, [1, 2, 3], 6)
    more = run(
        generator.generate(Session(key="a", seed=0), [4], Sampling(max_tokens=6, temperature=0.0))
    )
    assert list(more.ids) == reference(model, [1, 2, 3, *said.ids, 4], 6)


def test_supported_models_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HFGenerator(tiny_model("gemma3"), TOKENIZER, slots=1, max_context=64)


def test_other_tasks_run_between_passes_and_nothing_spins_when_idle():
    generator = HFGenerator(tiny_model(), TOKENIZER, slots=1, max_context=256, stop_ids=())
    ticks = 0

    async def main() -> int:
        nonlocal ticks
        task = asyncio.create_task(
            generator.generate(Session(key="a", seed=0), [1], Sampling(max_tokens=20))
        )
        while not task.done():
            ticks += 1
            await asyncio.sleep(0)
        tokens = len(task.result().ids)
        await asyncio.sleep(0)
        assert not [
            t
            for t in asyncio.all_tasks()
            if t is not asyncio.current_task() and "_drive" in repr(t)
        ]
        return tokens

    assert ticks >= run(main()) - 1
