"""Packed rows: the same scores, values, losses and gradients as padded ones, for every shape of
batch."""

import logging
from itertools import pairwise

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from train_parts import algorithm, batch, learner, policy, sample

from turnwise.algos.credit import compute_advantages
from turnwise.config.schema import TrainConfig
from turnwise.data.batch import Batch, collate
from turnwise.models import packing
from turnwise.models.packing import (
    RowLayout,
    packed_attention,
    packed_chunks,
    packed_passes,
    unpackable,
)
from turnwise.models.policy import Policy, Precision, make_critic, prepare
from turnwise.testing.tiny import tiny_model
from turnwise.train import passes
from turnwise.train.passes import choose_packing
from turnwise.train.update import Learner

KINDS = ["llama", "qwen2", "qwen3"]
POLICIES = {kind: policy(kind, temperature=0.8) for kind in KINDS}

turns = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows of very different lengths, some of them truncated."""
    rows = draw(st.lists(st.tuples(turns, st.booleans()), min_size=1, max_size=6))
    samples = []
    for number, (row, truncated) in enumerate(rows):
        ruler = "".join("." * seen + str(turn) * said for turn, (seen, said) in enumerate(row))
        ids = [(7 * number + 13 * index + 3) % 250 for index in range(len(ruler))]
        samples.append(
            sample(
                ids,
                ruler,
                episode=str(number),
                group=number % 2,
                reward=number - 1.5,
                truncated=truncated,
            )
        )
    return collate(samples)


def gradients(ours: Learner) -> torch.Tensor:
    parameters = [*ours.policy.parameters(), *ours.policy.critic_parameters()]
    return torch.cat(
        [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in parameters]
    )


@examples(12)
@given(rows=batches(), kind=st.sampled_from(KINDS))
def test_scores_and_values_are_those_of_the_padded_pass(rows: Batch, kind: str) -> None:
    ours = POLICIES[kind]
    layout = RowLayout.of(rows, packed=True)
    assert layout.packed is not None
    assert layout.packed.input_ids.shape == (1, rows.num_tokens)
    with torch.no_grad():
        scores, (values, bootstrap) = ours.score(rows), ours.value(rows)
        with ours.packed():
            packed_scores, (packed_values, packed_bootstrap) = (
                ours.score(rows, layout),
                ours.value(rows, layout),
            )
    torch.testing.assert_close(packed_scores.logprobs, scores.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_scores.entropies, scores.entropies, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_values, values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_bootstrap, bootstrap, atol=1e-5, rtol=1e-5)


@examples(12)
@given(
    rows=batches(),
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(["bi_level_gae", "gspo"]),
    tokens=st.sampled_from([1, 25, 999]),
)
def test_loss_and_gradients_are_those_of_the_padded_update(
    rows: Batch, kind: str, name: str, tokens: int
) -> None:
    ours = POLICIES[kind]
    settings = algorithm(name, entropy_coef=0.05, singleton="zero")
    found = []
    for asked in (False, True):
        learns = learner(ours, settings, micro_batch_tokens=tokens if asked else 999, packing=asked)
        assert learns.passes.packing is asked
        scored = learns.score(rows, old_logprobs=True)
        ready = compute_advantages(scored, settings)[0]
        ready = ready.replace(returns=torch.ones_like(ready.logprobs) * ready.response_mask)
        metrics = learns.gradients(ready)
        found.append((scored, metrics, gradients(learns)))
    (padded, padded_metrics, padded_gradient), (packed, packed_metrics, packed_gradient) = found
    torch.testing.assert_close(packed.old_logprobs, padded.old_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed.values, padded.values, atol=1e-5, rtol=1e-5)
    assert packed_metrics == pytest.approx(padded_metrics, abs=1e-5, rel=1e-4)
    torch.testing.assert_close(packed_gradient, padded_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_checkpointed_layers_run_packed_in_the_backward_pass_too(critic: str) -> None:
    found = []
    for checkpointing, asked in ((False, False), (True, True)):
        model = prepare(tiny_model(), gradient_checkpointing=checkpointing)
        head = make_critic(model, shared=critic == "shared")
        ours = Policy(model, None, precision=Precision.choose("auto", device="cpu"), critic=head)
        learns = learner(ours, algorithm(), packing=asked)
        rows = compute_advantages(learns.score(batch(), old_logprobs=True), learns.algorithm)[0]
        ours.train_mode(True)
        learns.gradients(rows)
        found.append(gradients(learns))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_the_attention_is_switched_back_after_an_error() -> None:
    ours = policy()
    learns = learner(ours, algorithm(), packing=True)
    assert ours.critic is not None
    assert ours.critic.trunk is not None
    rows = compute_advantages(learns.score(batch(), old_logprobs=True), learns.algorithm)[0]
    assert ours.model.config._attn_implementation == "sdpa"
    with pytest.raises(Exception, match="nan"):
        learns.update(rows.replace(advantages=torch.full_like(rows.logprobs, torch.nan)), step=0)
    assert ours.model.config._attn_implementation == "sdpa"
    assert ours.critic.trunk.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_what_cannot_be_packed_is_padded_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = policy(kind)
    with caplog.at_level(logging.WARNING):
        found = choose_packing(True, ours)
    reason = unpackable(ours.model.get_decoder())
    assert found is (reason is None)
    assert len(caplog.records) == (0 if found else 1)
    if kind == "gemma2":
        assert "padded instead of packed" in caplog.text


def test_rows_longer_than_the_window_are_padded() -> None:
    ours = policy("mistral")
    learns = learner(ours, algorithm(), packing=True)
    assert learns.passes.packing
    assert learns.passes.packs(batch())
    ids = list(range(3, 33))  # the window is 16
    long = collate([sample(ids, "." * 20 + "0" * 10, episode="a", group=0, reward=1.0)])
    assert not learns.passes.packs(long)
    with torch.no_grad():
        expected = ours.score(long).logprobs
    torch.testing.assert_close(learns.score(long, old_logprobs=True).old_logprobs, expected)


def test_on_the_cpu_packing_waits_to_be_asked_for() -> None:
    assert learner(policy(), algorithm()).passes.packing is False
    assert TrainConfig().packing == "auto"


@examples(50)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), limit=st.integers(1, 100))
def test_chunks_hold_every_row_once_and_are_even(lengths: list[int], limit: int) -> None:
    chunks = packed_chunks(lengths, limit)
    assert sorted(row for chunk in chunks for row in chunk) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in chunk) for chunk in chunks]
    assert all(size <= limit or len(chunk) == 1 for size, chunk in zip(sizes, chunks, strict=True))
    shared = [size for size in sizes if size <= limit]
    short = [length for length in lengths if length <= limit]
    if shared:
        assert max(shared) - min(shared) <= max(short), (
            "one row more or less is all that chunks differ by"
        )


@pytest.mark.parametrize("extra", [(), ("scale",), ("scale", "enable_gqa")])
def test_the_kernel_is_called_as_each_torch_wants_it(
    extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernel needs CUDA; a stand-in with its interface shows that shapes, groups and scale
    are right."""

    def kernel(query, key, value, cu_q, cu_k, max_q, max_k, **settings):
        assert query.shape[0] == key.shape[0] == int(cu_q[-1]) == int(cu_k[-1])
        assert max_q == max_k == 4
        assert settings.pop("is_causal", False) or settings.pop("window_size") == (-1, 0)
        grouped = settings.pop("enable_gqa", False)
        assert grouped or query.shape[1] == key.shape[1]
        states = [states.transpose(0, 1)[None] for states in (query, key, value)]
        scale = settings.pop("scale", None)
        assert not settings
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(s[:, :, a:b] for s in states), is_causal=True, scale=scale, enable_gqa=grouped
            )
            for a, b in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False)
        ]
        return torch.cat(parts, 2)[0].transpose(0, 1)

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    arguments = {
        "scaling": 0.2,
        "cu_seq_lens_q": torch.tensor([0, 4, 7], dtype=torch.int32),
        "max_length_q": 4,
    }
    expected, _ = packed_attention(torch.nn.Identity(), query, key, value, **arguments)
    causal = "window_size" if extra else "is_causal"
    monkeypatch.setattr(packing, "_KERNEL", packing.Kernel.of(kernel, frozenset({causal, *extra})))
    monkeypatch.setattr(packing, "has_kernel", lambda device, dtype: True)
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, **arguments)
    assert found.shape == (1, 7, 4, 8)
    torch.testing.assert_close(found, expected)


def test_a_packed_pass_without_boundaries_is_refused() -> None:
    model = tiny_model()
    with packed_passes(model), pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.slow  # the compiler takes most of a minute
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_give_the_same_gradients_and_leave_no_trace(kind: str) -> None:
    found: list[torch.Tensor] = []
    for compiled in (False, True):
        model = prepare(tiny_model(kind))
        ours = Policy(
            model,
            None,
            precision=Precision.choose("float32", device="cpu"),
            critic=make_critic(model, shared=False),
            compile=compiled,
        )
        learns = learner(ours, algorithm(entropy_coef=0.01), packing=True)
        # Nothing is tied to a shape.
        for given_rows in (
            batch(),
            batch().select(torch.tensor([1, 0])),
        ):
            rows = compute_advantages(
                learns.score(given_rows, old_logprobs=True), learns.algorithm
            )[0]
            learns.policy.train_mode(True)
            learns.gradients(rows)
            found.append(gradients(learns))
        assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    torch.testing.assert_close(found[2], found[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[3], found[1], atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


def rows_of(boundaries: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(boundaries.tolist()))


@pytest.fixture
def kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention over packed rows is for CUDA alone. Given a CPU's arithmetic, it is traced
    and compiled here as it is there."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def forward(
        query,
        key,
        value,
        rows,
        rows_k,
        longest,
        longest_k,
        causal=False,
        scale=None,
        window=None,
        *others,
    ):
        assert causal
        parts = [
            [states[a:b].transpose(0, 1) for states in (query, key, value)]
            for a, b in rows_of(rows)
        ]
        outs = [
            torch.nn.functional.scaled_dot_product_attention(
                *part, is_causal=True, scale=scale, enable_gqa=True
            )
            for part in parts
        ]
        lse = torch.empty(query.shape[1], query.shape[0])
        return (
            torch.cat(outs, 1).transpose(0, 1).contiguous(),
            lse,
            torch.zeros(2, dtype=torch.uint64),
        )

    def backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        rows,
        rows_k,
        longest,
        longest_k,
        causal,
        rng,
        scale=None,
        *others,
    ):
        found = [torch.zeros_like(states) for states in (query, key, value)]
        groups = query.shape[1] // key.shape[1]
        for a, b in rows_of(rows):
            q, g = (states[a:b].transpose(0, 1) for states in (query, grad))
            k, v = (
                states[a:b].transpose(0, 1).repeat_interleave(groups, 0) for states in (key, value)
            )
            later = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
            weights = (q @ k.mT * scale).masked_fill(later, -torch.inf).softmax(-1)
            inner = g @ v.mT
            logits = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
            by_head = (logits @ k, logits.mT @ q, weights.mT @ g)
            for target, grads in zip(found, by_head, strict=True):
                heads = grads.unflatten(0, (target.shape[1], -1)).sum(1)
                target[a:b] = heads.transpose(0, 1)
        return tuple(found)

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    for module in (packing, passes):
        monkeypatch.setattr(module, "has_kernel", lambda device, dtype: True)


@pytest.mark.slow  # the compiler takes most of a minute
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_is_compiled_in_one_piece_with_the_kernel_inside(
    kernel_on_cpu: None, checkpointing: bool
) -> None:
    from torch._dynamo.utils import counters

    found: list[torch.Tensor] = []
    for compiled in (False, True):
        model = prepare(tiny_model("qwen3"), gradient_checkpointing=checkpointing)
        precision = Precision.choose("float32", device="cpu")
        learns = learner(
            Policy(model, None, precision=precision, compile=compiled),
            algorithm("grpo"),
            packing=True,
        )
        assert learns.passes.packing
        counters.clear()
        # Nothing is tied to a shape.
        for given_rows in (
            batch(),
            batch().select(torch.tensor([1, 0])),
        ):
            rows = compute_advantages(
                learns.score(given_rows, old_logprobs=True), learns.algorithm
            )[0]
            learns.policy.train_mode(True)
            learns.gradients(rows)
            found.append(gradients(learns))
    torch.testing.assert_close(found[2], found[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[3], found[1], atol=1e-5, rtol=1e-4)
    assert counters["frames"]["ok"] > 0
    assert not counters["graph_break"], dict(counters["graph_break"])
    torch._dynamo.reset()
