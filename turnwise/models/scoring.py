# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Log-probs, entropies and values of a batch's tokens, without materialising all logits at once.

Only positions that the model produced are projected onto the vocabulary, a chunk at a time. Per
chunk, only each token's log-normaliser and entropy are kept. The backward pass recomputes the
chunk's logits and turns them into gradients of the hidden states and of the projection at once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwise.data.batch import Batch
from turnwise.models.packing import Packed, RowLayout

logger = logging.getLogger(__name__)
CHUNK_ELEMENTS = 8 * 1024 * 1024
"""Logits held at once (32 MB in float32). A vocabulary of 150k gives chunks of 55 positions."""
CUDA_CHUNK_ELEMENTS = 256 * 1024 * 1024
"""The same on CUDA, where small chunks leave the device idle: 1 GiB in float32, less where memory
is short."""
CHUNK_BYTES = 16
"""Peak memory per logit of a chunk in the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Log-probs and entropies of a batch's tokens; zero outside the response mask."""

    logprobs: Tensor  # [B, T] float32
    entropies: Tensor  # [B, T] float32


def trunk_of(model: nn.Module) -> nn.Module:
    """The part of a causal model that turns ids into hidden states, LoRA adapters included."""
    decoder = cast(Any, model).get_decoder()
    # A PeftModel answers get_decoder through its base model; some causal models return themselves
    # for unknown shapes.
    if decoder is model:
        raise TypeError(
            f"{type(model).__name__} does not separate its trunk from its head; pick a "
            "decoder-only model"
        )
    return decoder


def head_of(model: nn.Module) -> nn.Module:
    """The projection of a causal model onto its vocabulary."""
    head = cast(Any, model).get_output_embeddings()
    if head is None:
        raise TypeError(
            f"{type(model).__name__} has no output projection, so it cannot score tokens"
        )
    return head


def chunk_elements(device: torch.device) -> int:
    """Logits per chunk on this device; uses at most half of the memory that is free now."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS
    free = (
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
    )
    return max(min(CUDA_CHUNK_ELEMENTS, free // (2 * CHUNK_BYTES)), CHUNK_ELEMENTS)


def hidden_states(trunk: nn.Module, batch: Batch, packed: Packed | None = None) -> Tensor:
    """The trunk's last hidden states: [B, T, H], or [1, N, H] of the real tokens alone where they
    are packed.

    Padding lies on the right and attention is causal, so no real token can see it. No mask is
    passed: positions start at 0 by default, and the fused causal kernel is used for padded rows
    too.
    """
    arguments = {"input_ids": batch.input_ids} if packed is None else packed.arguments()
    return cast(Any, trunk)(**arguments, use_cache=False).last_hidden_state


def token_scores(
    head: nn.Module,
    hidden: Tensor,  # [B, T, H], or [1, N, H] where the layout is packed
    batch: Batch,
    *,
    temperature: float,
    softcap: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    layout: RowLayout | None = None,
) -> TokenScores:
    """Log-prob and entropy of every response token under the distribution at the sampling
    temperature.

    Token t is chosen from the hidden state at t - 1; a response cannot be the first token of a row.
    """
    layout = RowLayout.of(batch) if layout is None else layout
    zeros = torch.zeros(batch.input_ids.shape, dtype=torch.float32, device=hidden.device)
    if not layout.rows.numel():
        return TokenScores(logprobs=zeros, entropies=zeros)
    states = layout.states_before(hidden)  # [R, H]
    targets = batch.input_ids[layout.rows, layout.columns]  # [R]
    logprobs, entropies = score_states(
        head,
        states,
        targets,
        temperature=temperature,
        softcap=softcap,
        chunk_elements=chunk_elements,
    )
    where = (layout.rows, layout.columns)
    return TokenScores(
        logprobs=zeros.index_put(where, logprobs), entropies=zeros.index_put(where, entropies)
    )


@torch.no_grad()
def greedy_hits(
    head: nn.Module,
    hidden: Tensor,  # [B, T, H], or [1, N, H] where the layout is packed
    batch: Batch,
    *,
    chunk_elements: int,
    layout: RowLayout,
) -> Tensor:  # [R] bool
    """True for every response token that is the most likely one in its place."""
    size = max(chunk_elements // int(cast(Any, head).weight.shape[0]), 1)
    states = layout.states_before(hidden)
    targets = batch.input_ids[layout.rows, layout.columns]
    found = [head(part).argmax(-1) for part in states.split(size)]
    return torch.cat(found) == targets


def score_states(
    head: nn.Module,
    states: Tensor,  # [R, H]
    targets: Tensor,  # [R]
    *,
    temperature: float,
    softcap: float | None,
    chunk_elements: int,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), [R] each, of the targets under the head's distributions in these
    states."""
    size = max(chunk_elements // int(cast(Any, head).weight.shape[0]), 1)
    # A single chunk fits the budget, so autograd may keep it.
    if states.device.type == "cpu" and states.shape[0] <= size:
        return _plain(head, states, targets, temperature, softcap)
    if type(head) is nn.Linear:
        return cast(
            tuple[Tensor, Tensor],
            _Fused.apply(states, head.weight, head.bias, targets, temperature, softcap, size),
        )
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, states.shape[0], size):
        part = (
            head,
            states[start : start + size],
            targets[start : start + size],
            temperature,
            softcap,
        )
        found.append(
            checkpoint(_plain, *part, use_reentrant=False)
            if torch.is_grad_enabled()
            else _plain(*part)  # type: ignore
        )
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat(
        [entropies for _, entropies in found]
    )


def _plain(
    head: nn.Module, states: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    normalised = torch.log_softmax(at_temperature(head(states), temperature, softcap), dim=-1)
    logprob = normalised.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(normalised.exp() * normalised.masked_fill(normalised == -torch.inf, 0.0)).sum(-1)
    return logprob, entropy


def at_temperature(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Logits of the distribution that is sampled from."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1.0 else logits / temperature


def _forward(
    logits: Tensor,  # [N, V], as the projection gave them
    targets: Tensor,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, log-normalisers), [N] each."""
    tempered = at_temperature(logits, temperature, softcap)
    normaliser = torch.logsumexp(tempered, dim=-1)
    normalised = tempered - normaliser[:, None]
    entropy = -(normalised.exp() * normalised.masked_fill(normalised == -torch.inf, 0.0)).sum(-1)
    return tempered.gather(-1, targets[:, None]).squeeze(-1) - normaliser, entropy, normaliser


def _backward(
    logits: Tensor,  # [N, V], as the projection gave them
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """The gradient of the projection's logits [N, V], in their precision.

    With p the probabilities, y the target's one-hot row and E the entropy: d log-prob / d logit = y
    - p, d E / d logit = -p (log p + E); then the chain through temperature and cap.
    """
    normalised = at_temperature(logits, temperature, softcap) - normaliser[:, None]
    p = normalised.exp()
    if grad_logprob is None:
        grad = torch.zeros_like(p)
    elif logits.is_cuda:
        # A comparison instead of a scatter, so that the compiler fuses everything into one pass.
        grad = _towards_target(p, targets) * grad_logprob[:, None]
    else:
        grad = p * -grad_logprob[:, None]
        grad.scatter_add_(1, targets[:, None], grad_logprob[:, None])
    if grad_entropy is not None:
        safe = normalised.masked_fill(normalised == -torch.inf, 0.0)
        grad = grad - grad_entropy[:, None] * p * (safe + entropy[:, None])
    if temperature != 1.0:
        grad = grad / temperature
    if softcap is not None:
        grad = grad * (1.0 - torch.tanh(logits.to(p.dtype) / softcap).square())
    return grad.to(logits.dtype)


def _towards_target(p: Tensor, targets: Tensor) -> Tensor:
    """One-hot rows of the targets minus p."""
    chosen = torch.arange(p.shape[1], device=p.device)[None] == targets[:, None]
    return torch.where(chosen, 1.0 - p, -p)


class _OnDevice:
    """A function over a chunk's logits: compiled into one pass over them on CUDA, as it is
    elsewhere."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    def __call__(self, logits: Tensor, *arguments: Any) -> Any:
        if logits.device.type != "cuda" or self._failed:
            return self._plain(logits, *arguments)
        if self._compiled is None:
            self._compiled = torch.compile(self._plain, dynamic=True)
        try:
            return self._compiled(logits, *arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Compilers raise many kinds of errors; the uncompiled function gives the same results.
            logger.warning(
                "log-probs run uncompiled, which is slower: compiling them failed with %r", error
            )
            self._failed = True
            return self._plain(logits, *arguments)


_forward_on_device = _OnDevice(_forward)
_backward_on_device = _OnDevice(_backward)


class _Fused(torch.autograd.Function):
    """Fused projection, log-prob and entropy, chunk by chunk; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        logits: Tensor | None = None
        for start in range(0, states.shape[0], size):
            logits = F.linear(states[start : start + size], weight, bias)
            found.append(
                _forward_on_device(logits, targets[start : start + size], temperature, softcap)
            )
        logprobs, entropies, normalisers = (torch.cat(parts) for parts in zip(*found, strict=True))
        # A single chunk fits the budget and need not be recomputed.
        kept = logits if len(found) == 1 else None
        ctx.save_for_backward(states, weight, bias, targets, entropies, normalisers, kept)
        ctx.settings = (temperature, softcap, size)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        states, weight, bias, targets, entropies, normalisers, kept = ctx.saved_tensors
        temperature, softcap, size = ctx.settings
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_states = torch.empty_like(states) if wants_states else None
        grad_weight = (
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        )
        grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if wants_bias else None
        for start in range(0, states.shape[0], size):
            part = slice(start, start + size)
            logits = F.linear(states[part], weight, bias) if kept is None else kept
            of_scores = [None if grad is None else grad[part] for grad in grads]
            grad = _backward_on_device(
                logits,
                targets[part],
                normalisers[part],
                entropies[part],
                *of_scores,
                temperature,
                softcap,
            )
            del logits
            if grad_states is not None:
                torch.mm(grad, weight, out=grad_states[part])
            if grad_weight is not None:
                grad_weight += grad.T @ states[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def token_values(
    head: nn.Module, hidden: Tensor, batch: Batch, packed: Packed | None = None
) -> tuple[Tensor, Tensor]:
    """(values [B, T], bootstrap [B]): the critic's value of the prefix before each response token,
    and of the whole row if it was truncated. Zero elsewhere."""
    every = head(hidden).squeeze(-1).float()  # [B, T]: value of the prefix that ends with token t
    if packed is not None:
        every = packed.pad(every[0], batch.input_ids.shape[1])
    before = torch.cat([torch.zeros_like(every[:, :1]), every[:, :-1]], dim=1)
    values = before.masked_fill(~batch.response_mask, 0.0)
    last = (batch.lengths - 1).clamp(min=0)
    whole = every.gather(1, last[:, None]).squeeze(1)
    return values, whole.masked_fill(~batch.truncated, 0.0)
