"""The block engine's kernels and graphs on CUDA, against plain torch and the plain forward pass."""

import asyncio

import pytest
import torch

from turnwise.generate.base import Sampling, Session
from turnwise.generate.blocks import ops
from turnwise.generate.blocks.ops import SlotState
from turnwise.generate.blocks.staging import Staging
from turnwise.generate.hf import HFGenerator
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize(
    ("dtype", "block", "window", "cap", "heads", "kv_heads", "dim"),
    [
        (torch.float32, 1, 0, 0.0, 9, 3, 64),
        (torch.float32, 16, 7, 0.0, 4, 2, 8),
        (torch.float32, 16, 0, 30.0, 8, 1, 80),
        (torch.bfloat16, 1, 7, 30.0, 12, 2, 128),
        (torch.bfloat16, 16, 0, 0.0, 9, 3, 64),
    ],
)
def test_attention_equals_plain_torch(dtype, block, window, cap, heads, kv_heads, dim) -> None:
    torch.manual_seed(0)
    length = 200

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    first = torch.tensor([0, 5, 63, 150, 64, 0], device="cuda")
    count = numbers(1, block, max(1, block // 2), block, 1, 0)
    rows = at = None
    # Slots 2 and 3 begin in others.
    holders, shared = (
        numbers(0, 1, 1, 0, 4, 5, 6),
        numbers(0, 0, 0, 128, 0, 0, 0),
    )
    if block == 1:
        shared[2] = 64  # a block's own tokens are never shared
    else:
        # End to end, and one block of padding.
        rows, at = (
            numbers(0, 1, 2, 3, 0, 6),
            count.cumsum(0) - count,
        )
    num = int(count.sum()) + (block if block > 1 else 1)
    query = torch.randn(num, heads, dim, device="cuda", dtype=dtype)
    keys, values = (
        torch.randn(7, kv_heads, length + 1, dim, device="cuda", dtype=dtype) for _ in range(2)
    )
    arguments = (
        query,
        keys,
        values,
        rows,
        at,
        first,
        count,
        holders,
        shared,
        block,
        dim**-0.5,
        window,
        cap,
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        ops.attend(*arguments), ops._attend_reference(*arguments), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("vocab", [259, 49152, 151_936])
def test_draws_equal_plain_torch(vocab: int) -> None:
    torch.manual_seed(0)
    rows = 64
    states = []
    logits = torch.randn(rows, vocab, device="cuda") * 3
    for device in ("cuda", "cpu"):
        state = SlotState.make(
            slots=rows, length=100, vocab=vocab, ring=4, device=torch.device(device)
        )
        state.seed.copy_(torch.arange(rows + 1) * 7_919_111_222_333)
        state.position.copy_(torch.arange(rows + 1) % 90)
        state.count.fill_(1)
        state.count[5] = 0
        state.left.copy_(torch.arange(rows + 1) % 3 + 1)
        state.temperature.copy_(torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(rows)[: rows + 1])
        state.stop[::7] = 1
        index = torch.arange(rows, dtype=torch.int32, device=device)
        ops.advance(logits.to(device), index, index, state, decode=True)
        states.append(state)
    ours, plain = states
    same = ours.out_ids[0].cpu() == plain.out_ids[0]
    assert same.float().mean() > 0.98  # a draw on the edge of two tokens may fall on either side
    for name in ("token", "position", "write", "count", "left"):
        torch.testing.assert_close(
            getattr(ours, name)[:rows].cpu()[same], getattr(plain, name)[:rows][same]
        )
    assert ours.out_ids[0, 5] == -1
    torch.testing.assert_close(
        ours.out_logprobs[0].cpu()[same], plain.out_logprobs[0][same], atol=1e-4, rtol=1e-4
    )


def behind_the_best(model, held: list[int], reply: tuple[int, ...]) -> float:
    """How far a greedy reply's tokens lie behind the best ones, at most: ties that rounding decides
    may fall apart."""
    with torch.no_grad():
        logits = model(torch.tensor([[*held, *reply]], device="cuda")).logits[0, len(held) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(reply, device="cuda")[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral"])
def test_captured_greedy_takes_the_best_token_over_turns(kind: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(kind).cuda()
    generator = HFGenerator(model, tiny_tokenizer(), slots=4, max_context=400)
    assert generator._blocks is not None

    async def one(name: int) -> None:
        session = Session(key=str(name), seed=name)
        held: list[int] = []
        for turn in range(3):
            new = [(31 * name + 17 * turn + i) % 250 for i in range(5 + 20 * (name % 3))]
            held += new
            reply = await generator.generate(session, new, Sampling(max_tokens=12, temperature=0.0))
            assert behind_the_best(model, held, reply.ids) < 2e-3
            held += reply.ids

    async def run() -> None:
        await asyncio.gather(*(one(name) for name in range(6)))

    asyncio.run(run())


def test_compiled_step_draws_the_same_and_follows_the_weights() -> None:
    model = tiny_model("llama").cuda()
    plain = HFGenerator(model, tiny_tokenizer(), slots=4, max_context=128)
    compiled = HFGenerator(model, tiny_tokenizer(), slots=4, max_context=128, compile=True)
    sampling = Sampling(max_tokens=20)

    def say(generator: HFGenerator, key: str) -> tuple[int, ...]:
        return asyncio.run(generator.generate(Session(key=key, seed=5), [1, 2, 3], sampling)).ids

    assert say(plain, "a") == say(compiled, "a")
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    plain.weights_updated(1)
    compiled.weights_updated(1)
    assert say(plain, "b") == say(compiled, "b")
    compiled.free_cache()
    assert compiled.cache_bytes == 0
    assert say(compiled, "d") == say(plain, "d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed"),
    [(9, 3, 64, False), (12, 2, 128, False), (4, 2, 8, True)],
)
def test_fused_kernels_equal_plain_torch(dtype, heads, kv_heads, dim, normed) -> None:
    torch.manual_seed(0)
    num, slots, length, width = 20, 6, 50, 576
    tolerance = (
        {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    )
    residual, added = (torch.randn(num, width, dtype=dtype) for _ in range(2))
    weight = torch.rand(width, dtype=dtype) + 0.5
    for extra in (None, added):
        plain = ops.add_norm(residual.clone(), extra, weight, eps=1e-5)
        ours = ops.add_norm(
            residual.cuda(), None if extra is None else extra.cuda(), weight.cuda(), eps=1e-5
        )
        for left, right in zip(ours, plain, strict=True):
            torch.testing.assert_close(left.cpu(), right, **tolerance)
    both = torch.randn(num, 2 * 1536, dtype=dtype)
    torch.testing.assert_close(ops.silu_mul(both.cuda()).cpu(), ops.silu_mul(both), **tolerance)
    angles = torch.rand(length + 1, dim // 2)
    arguments = {
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "positions": torch.randint(0, length, (num,)),
        "rows": torch.arange(num) % slots,
        "write": torch.arange(num),
        "query_norm": torch.rand(dim, dtype=dtype) if normed else None,
        "key_norm": torch.rand(dim, dtype=dtype) if normed else None,
    }
    qkv = torch.randn(num, (heads + 2 * kv_heads) * dim, dtype=dtype)
    results = []
    for device in ("cpu", "cuda"):
        keys, values = (
            torch.zeros(slots + 1, kv_heads, length + 1, dim, dtype=dtype, device=device)
            for _ in range(2)
        )
        moved = {
            name: None if value is None else value.to(device) for name, value in arguments.items()
        }
        query = ops.rope_write(
            qkv.to(device), keys=keys, values=values, heads=heads, eps=1e-5, **moved
        )
        results.append([tensor.cpu() for tensor in (query, keys, values)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, **tolerance)


def test_sessions_that_share_their_opening_stay_apart() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model("llama").cuda()
    generator = HFGenerator(model, tiny_tokenizer(), slots=6, max_context=200)
    prompt = [(7 * i) % 250 for i in range(45)]

    async def one(name: int) -> None:
        session = Session(key=str(name), seed=name)
        held: list[int] = []
        for new in ([*prompt, 100 + name // 4], [3, 4, name]):
            held += new
            reply = await generator.generate(session, new, Sampling(max_tokens=12, temperature=0.0))
            assert behind_the_best(model, held, reply.ids) < 2e-3
            held += reply.ids
        await generator.release(session)

    async def run() -> None:
        await asyncio.gather(*(one(name) for name in range(12)))

    asyncio.run(run())
    assert generator.stats.shared_tokens > 200


def test_numbers_reach_the_device_whatever_is_sent_after_them() -> None:
    """Memory is used again only after the device has read it, however far behind the device is."""
    staging = Staging(torch.device("cuda"))
    target = torch.zeros(3000, dtype=torch.int64, device="cuda")
    sent: list[torch.Tensor] = []
    for _ in range(3):
        torch.cuda._sleep(20_000_000)  # some ten milliseconds, in which nothing is copied
        for number in range(20):
            sent.append(staging.send([len(sent), number]))
            staged = staging.take(3000)
            staged.values[:] = len(sent)
            staged.send(target)
    assert [tensor.tolist() for tensor in sent] == [[index, index % 20] for index in range(60)]
    assert target.tolist() == [60] * 3000
    assert sum(map(len, staging._pieces.values())) < 120  # of the last round nothing was new
