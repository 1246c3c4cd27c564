"""The parts of the in-process engine: noise, draws, stops, scheduling, lengths; and the generation
benchmark."""

import importlib.util
import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnwise.generate.base import Sampling
from turnwise.generate.sampling import draw, truncate, uniform
from turnwise.generate.scheduler import Scheduler, SessionState, chunks
from turnwise.generate.slots.cache import SlotCache, SlotView
from turnwise.generate.slots.passes import attention_lengths, exact_lengths
from turnwise.generate.stops import StopChecker, end_ids
from turnwise.testing.tiny import tiny_tokenizer

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64's finaliser in plain integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40))
@examples(50)
def test_noise_is_splitmix_of_seed_and_position(seed: int, position: int):
    golden = 0x9E3779B97F4A7C15
    bits = mix((mix((seed + golden) & MASK) + position * golden) & MASK)
    assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == (bits >> 12) * 2.0**-52


def test_noise_is_uniform_and_uncorrelated():
    seeds = torch.arange(200).repeat_interleave(200)
    u = uniform(seeds, torch.arange(200).repeat(200)).view(200, 200)
    counts = torch.histc(u.flatten(), bins=20, min=0, max=1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 45  # chi-square, 19 degrees of freedom
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02


def many(logits: torch.Tensor, count: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    row = logits[None].expand(count, -1)
    temperature = torch.full((count,), options.pop("temperature", 1.0))
    return draw(
        row,
        seeds=torch.arange(count),
        positions=torch.full((count,), 3),
        temperature=temperature,
        **options,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float):
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, -math.inf])
    ids, logprobs = many(logits, 20_000, temperature=temperature)
    probs = (logits / temperature).softmax(-1)
    shares = torch.bincount(ids, minlength=5) / 20_000
    assert (shares - probs).abs().max() < 0.015
    assert shares[4] == 0
    torch.testing.assert_close(logprobs, probs.log()[ids])


def test_top_k_and_top_p_report_the_truncated_distribution():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    ids, logprobs = many(logits, 500, top_k=torch.full((500,), 2), top_p=torch.ones(500))
    assert set(ids.tolist()) == {1, 3}
    torch.testing.assert_close(logprobs.exp(), torch.where(ids == 1, 4 / 7, 3 / 7))
    ids, logprobs = many(
        logits, 500, top_k=torch.zeros(500, dtype=torch.long), top_p=torch.full((500,), 0.75)
    )
    assert set(ids.tolist()) == {1, 2, 3}
    torch.testing.assert_close(logprobs[ids == 2].exp()[0].item(), 0.2 / 0.9)


def test_truncation_is_per_row_and_always_leaves_one():
    logits = torch.tensor([[3.0, 2.0, 1.0]]).repeat(3, 1)
    left = truncate(
        logits, top_k=torch.tensor([0, 1, 0]), top_p=torch.tensor([1.0, 1.0, 1e-6])
    ).isfinite()
    assert left.tolist() == [[True] * 3, [True, False, False], [True, False, False]]


def test_a_row_does_not_see_the_others():
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    noise = {"seeds": torch.arange(8), "positions": torch.arange(8), "temperature": torch.ones(8)}
    ids, logprobs = draw(logits, **noise)
    for row in range(8):
        one = {name: value[row : row + 1] for name, value in noise.items()}
        alone = draw(logits[row : row + 1], **one)
        assert (alone[0].item(), alone[1].item()) == (ids[row].item(), logprobs[row].item())


def test_a_stop_string_is_found_in_any_place_even_across_bytes():
    tokenizer = tiny_tokenizer()
    stops = StopChecker(tokenizer, ids=frozenset(), strings=("é!", "</a>"))
    said = tokenizer.encode("x" * 100 + "é!", add_special_tokens=False)
    assert not any(stops.reached(said[:n]) for n in range(1, len(said)))
    assert stops.reached(said)
    with pytest.raises(ValueError, match="empty"):
        StopChecker(tokenizer, ids=frozenset(), strings=("",))


PIECES = ("</answer>", "</ans", "wer>", ">", "<", "\u00e9", "\n", " ", "!", "ab", "\u4e16")
STOPS = ("</answer>", "\n\n", "\u00e9", "\u00e9!", "b ", ">")


@cache
def merged_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens span the ends of stop strings."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(
        ["a</answer>, b</answer>; \u00e9\n\n x\u00e9! </answer>a"] * 9, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


@examples(150)
@given(
    st.sampled_from(["bytes", "merged"]),
    st.lists(
        st.sampled_from(
            ["</answer>", "</ans", "wer>", ">", "<", "\u00e9", "\n", " ", "!", "ab", "\u4e16"]
        ),
        max_size=9,
    ),
    st.lists(
        st.sampled_from(["</answer>", "\n\n", "\u00e9", "\u00e9!", "b ", ">"]),
        min_size=1,
        max_size=2,
        unique=True,
    ),
)
def test_a_stop_string_ends_a_completion_with_the_first_token_that_completes_it(
    kind: str, pieces: list[str], strings: list[str]
) -> None:
    tokenizer = tiny_tokenizer() if kind == "bytes" else merged_tokenizer()
    said = tokenizer.encode("".join(pieces), add_special_tokens=False)
    stops = StopChecker(tokenizer, ids=frozenset(), strings=strings)
    for end in range(1, len(said) + 1):
        held = any(string in tokenizer.decode(said[:end]) for string in strings)
        assert stops.reached(said[:end]) == held
        if held:
            break


def test_end_ids_of_a_tokenizer_without_a_template():
    assert end_ids(tiny_tokenizer("none"), None) == {258}


def state(key: str, ids: int, *, chunk: int = 64) -> SessionState:
    state = SessionState(key=key, seed=0)
    state.ask(list(range(ids)), sampling=Sampling(max_tokens=4), chunk=chunk)
    return state


def advance(scheduler: Scheduler, sessions: list[SessionState]) -> None:
    """Runs one pass as the generator does: prefill if somebody waits, else decode."""
    scheduler.admit()
    batch = scheduler.next_prefill()[0] or scheduler.next_decode()
    for one in batch:
        if one.advance():
            one.append(1, -1.0)
            if len(one.logprobs) < 4:
                one.decode_last()
            else:
                scheduler.finish(one)


@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    slots=st.integers(1, 4),
    exact=st.booleans(),
)
@examples(40)
def test_every_session_is_served_whatever_the_slots(sizes: list[int], slots: int, exact: bool):
    scheduler = Scheduler(slots=slots, chunk=64, prefill_tokens=128, exact=exact)
    sessions = [state(str(i), size) for i, size in enumerate(sizes)]
    for turn in range(2):
        for one in sessions:
            if turn:
                one.ask([5, 6, 7], sampling=Sampling(max_tokens=4), chunk=64)
            scheduler.submit(one)
        for _ in range(1000):
            if not scheduler.busy:
                break
            advance(scheduler, sessions)
            held = [one.slot for one in sessions if one.slot is not None]
            assert len(held) == len(set(held)) <= slots
        assert not scheduler.busy
    for size, one in zip(sizes, sessions, strict=True):
        assert len(one.ids) == size + 4 + 3 + 4
        edges = [(span.start, span.end) for span in one.spans]
        assert edges[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
        assert one.covered == len(one.ids) - 1  # the last sampled id enters with the next prompt


def test_an_evicted_session_is_replayed_in_its_own_spans_or_in_chunks():
    for exact, expected in ((True, [(0, 3, False), (3, 6, True)]), (False, [(0, 6, False)])):
        scheduler = Scheduler(slots=1, chunk=64, prefill_tokens=64, exact=exact)
        one = state("a", 3)
        scheduler.submit(one)
        while scheduler.busy:
            advance(scheduler, [one])
        scheduler.evict(one)
        assert [(span.start, span.end, span.decode) for span in one.spans] == expected
        assert (one.slot, one.cached, one.at) == (None, 0, 0)


def test_rolling_back_restores_ids_spans_and_cache():
    one = state("a", 5)
    one.advance()
    one.append(9, -1.0)
    one.sampling = None
    one.ask([1, 2], sampling=Sampling(max_tokens=4), chunk=64)
    one.advance()
    one.append(8, -1.0)
    one.decode_last()
    one.advance()
    one.roll_back()
    assert (one.ids, one.cached, one.at, one.covered) == ([0, 1, 2, 3, 4, 9], 5, 1, 5)


def test_a_prefill_waits_to_be_shared_but_not_for_ever():
    scheduler = Scheduler(slots=8, chunk=64, prefill_tokens=128, exact=True)
    sessions = [state(str(i), 10) for i in range(4)]
    for one in sessions:
        scheduler.submit(one)
    advance(scheduler, sessions)
    late = state("late", 10)
    scheduler.submit(late)
    passes = 0
    while late.cached == 0:
        for one in sessions:
            one.logprobs.clear()  # they go on decoding
        advance(scheduler, sessions)
        passes += 1
    assert 1 < passes < 12


def test_chunks_depend_on_the_length_alone():
    assert [(s.start, s.end) for s in chunks(3, 10, chunk=4)] == [(3, 7), (7, 10)]
    assert chunks(3, 3, chunk=4) == []


def test_padding_never_reaches_a_row():
    cache = SlotCache(slots=2, length=4)
    view = SlotView(
        rows=None, positions=torch.tensor([[1], [0]]), write=torch.tensor([[1], [4]]), length=4
    )
    cache.view = view
    keys, values = cache.update(torch.ones(2, 1, 1, 3), torch.full((2, 1, 1, 3), math.nan), 0)
    assert keys.shape == (2, 1, 4, 3)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 0, 0]
    assert not keys[1].any()
    assert not values[1].isnan().any()
    cache.clear_row(0)
    assert not cache.update(torch.ones(2, 1, 1, 3), torch.ones(2, 1, 1, 3), 0)[1].isnan().any()


def test_lengths_are_exact_or_left_out():
    lengths = attention_lengths(1024)
    exact = exact_lengths(lengths, heads=4, kv_heads=2, dim=16, softcap=None, sizes=(1, 16))
    assert exact[-1] == 1024
    assert set(exact) <= set(lengths)
    assert exact_lengths([8], heads=1, kv_heads=1, dim=4, softcap=None, sizes=(1,)) == [8]


def test_the_benchmark_runs_and_prefills_linearly():
    path = Path(__file__).parents[2] / "benchmarks" / "generation.py"
    spec = importlib.util.spec_from_file_location("generation_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    result = module.measure(module.QUICK)
    torch.set_num_threads(threads)
    kept, anew = result["kept"]["prefilled"], result["anew"]["prefilled"]
    assert kept == [kept[0]] + [kept[0] + module.QUICK.sessions] * (module.QUICK.turns - 1)
    assert [b - a for a, b in itertools.pairwise(anew)] == [anew[1] - anew[0]] * (
        module.QUICK.turns - 1
    )
    assert "speed-up" in module.table(result)
