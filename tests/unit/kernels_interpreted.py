"""Compares the block engine's kernels with plain torch, by Triton's interpreter. Run by
test_kernels_interpreted.py."""

import torch

from turnwise.generate.blocks import kernels, ops


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def attention() -> None:
    keys, values = torch.randn(6, 3, 301, 64), torch.randn(6, 3, 301, 64)
    holders = torch.tensor([0, 0, 2, 0, 4, 5], dtype=torch.int32)
    shared = torch.tensor([0, 64, 0, 128, 0, 0], dtype=torch.int32)
    for block, rows, at, first, count in (
        (1, None, None, [70, 130, 64, 255, 10], [1, 1, 1, 1, 0]),
        (
            16,
            [1, 3, 2, 5, 5],
            [0, 16, 25, 28, 44],
            [66, 140, 0, 0, 0],
            [16, 9, 3, 0, 0],
        ),  # end to end, then padding
    ):
        where = [
            None if numbers is None else torch.tensor(numbers)
            for numbers in (rows, at, first, count)
        ]
        query = torch.randn(5 if block == 1 else 50, 9, 64)
        for window, cap in ((0, 0.0), (50, 0.0), (0, 20.0)):
            found = kernels.attend(
                query,
                keys,
                values,
                *where,
                holders,
                shared,
                block=block,
                scale=0.125,
                window=window,
                cap=cap,
            )
            expected = ops._attend_reference(
                query, keys, values, *where, holders, shared, block, 0.125, window, cap
            )
            close(found, expected)


def layers() -> None:
    residual, added, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    for extra in (None, added):
        expected = ops.add_norm(residual, extra, weight, eps=1e-6)
        for one, other in zip(
            kernels.add_norm(residual.clone(), extra, weight, eps=1e-6), expected, strict=True
        ):
            close(one, other)
    both = torch.randn(4, 2 * 1100)
    close(kernels.silu_mul(both), ops.silu_mul(both))
    angles = torch.randn(41, 16)
    for norm in (None, torch.randn(32)):
        caches = [[torch.zeros(4, 2, 41, 32) for _ in range(2)] for _ in range(2)]
        qkv = torch.randn(3, (6 + 2 * 2) * 32)
        queries = [
            function(
                qkv,
                cos=angles.cos(),
                sin=angles.sin(),
                positions=torch.tensor([0, 7, 39]),
                rows=torch.tensor([2, 0, 3]),
                write=torch.tensor([0, 7, 40]),
                keys=keys,
                values=values,
                heads=6,
                query_norm=norm,
                key_norm=norm,
                eps=1e-6,
            )
            for function, (keys, values) in zip(
                (kernels.rope_write, ops.rope_write), caches, strict=True
            )
        ]
        close(*queries)
        for one, other in zip(*caches, strict=True):
            close(one, other)


if __name__ == "__main__":
    torch.manual_seed(0)
    attention()
    layers()
