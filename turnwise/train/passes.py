# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""How a batch runs through the networks: packed or padded, in micro-batches whose gradients are
summed."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turnwise.data.batch import Batch
from turnwise.models.packing import RowLayout, has_kernel, packed_chunks, unpackable, window_of
from turnwise.models.policy import Policy
from turnwise.models.scoring import trunk_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows of a batch that run through the networks together."""

    rows: Tensor  # [B'] int64: their numbers in the batch
    batch: Batch
    layout: RowLayout


class Passes:
    """The passes of one policy: whether its rows are packed, and how many tokens run at once.

    Args:
        packing: as `train.packing`.
        tokens: most tokens of a micro-batch.
    """

    def __init__(self, policy: Policy, *, packing: Literal["auto"] | bool, tokens: int) -> None:
        self._policy = policy
        self._tokens = tokens
        self.packing = choose_packing(packing, policy)
        """Rows are packed instead of padded."""
        self._window = window_of(policy.model)

    def packs(self, batch: Batch) -> bool:
        """Whether this batch is packed: not where a row is longer than a layer's window."""
        return self.packing and (self._window is None or int(batch.lengths.max()) <= self._window)

    def attention(self, packed: bool) -> AbstractContextManager[None]:
        """The context of packed passes, backward passes included."""
        return self._policy.packed() if packed else nullcontext()

    def micro_batches(self, batch: Batch, *, packed: bool) -> list[MicroBatch]:
        """The batch in parts of at most `tokens`: real ones where rows are packed, else padded
        ones.

        All are laid out before the first one runs, so that the host synchronizes with the device
        only here.
        """
        device = batch.input_ids.device
        if packed:
            chunks = [
                torch.tensor(rows, device=device)
                for rows in packed_chunks(batch.lengths.tolist(), self._tokens)
            ]
        else:
            chunks = batch.chunks(self._tokens)
        parts = [(rows, batch.select(rows)) for rows in chunks]
        return [
            MicroBatch(rows=rows, batch=part, layout=RowLayout.of(part, packed=packed))
            for rows, part in parts
        ]


def over_rows(
    batch: Batch, micros: Sequence[MicroBatch], function: Callable[[Batch, RowLayout], Tensor]
) -> Tensor:
    """[B, T]: the results of `function` for all rows, computed by micro-batch."""
    result = torch.zeros_like(batch.logprobs)
    for micro in micros:
        found = function(micro.batch, micro.layout)
        result[micro.rows, : found.shape[1]] = found
    return result


def choose_packing(asked: Literal["auto"] | bool, policy: Policy) -> bool:
    """True if this policy's rows are packed: if requested, or under auto if one kernel attends to
    all rows.

    A model that cannot be packed is padded, with one warning where packing was expected.
    """
    auto = has_kernel(policy.precision.device, policy.precision.dtype)
    if asked is False or (asked == "auto" and not auto):
        return False
    reason = unpackable(trunk_of(policy.model))
    if reason is not None:
        logger.warning("rows are padded instead of packed, which is slower: %s", reason)
    return reason is None
