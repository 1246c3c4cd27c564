"""Log-probs, entropies and values of a batch's tokens, without ever holding every logit at once.

Only positions that the model produced are projected onto the vocabulary, a chunk at a time, and a chunk's logits are
computed again in the backward pass instead of being kept.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwise.data.batch import Batch

CHUNK_ELEMENTS = 8 * 1024 * 1024
"""Logits held at once (32 MB in float32). A vocabulary of 150k gives chunks of 55 positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What a policy says about the tokens of a batch; zero outside the response mask."""

    logprobs: Tensor  # [B, T] float32
    entropies: Tensor  # [B, T] float32


def trunk_of(model: nn.Module) -> nn.Module:
    """The part of a causal model that turns ids into hidden states, LoRA adapters included."""
    decoder = cast(Any, model).get_decoder()
    # A PeftModel answers get_decoder through its base model; some causal models return themselves for unknown shapes.
    if decoder is model:
        raise TypeError(f"{type(model).__name__} does not separate its trunk from its head; pick a decoder-only model")
    return decoder


def head_of(model: nn.Module) -> nn.Module:
    """The projection of a causal model onto its vocabulary."""
    head = cast(Any, model).get_output_embeddings()
    if head is None:
        raise TypeError(f"{type(model).__name__} has no output projection, so it cannot score tokens")
    return head


def hidden_states(trunk: nn.Module, batch: Batch) -> Tensor:  # [B, T, H]
    """The trunk's last hidden states.

    Padding lies on the right and attention is causal, so no real token can see it. No mask is passed: positions count
    from 0 by default, and the fused causal kernel is taken whether a row is padded or not.
    """
    return cast(Any, trunk)(input_ids=batch.input_ids, use_cache=False).last_hidden_state


def token_scores(
    head: nn.Module,
    hidden: Tensor,  # [B, T, H]
    batch: Batch,
    *,
    temperature: float,
    softcap: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenScores:
    """Log-prob and entropy of every response token under the tempered distribution, the one it was drawn from.

    Token t is chosen from the hidden state at t - 1; a response cannot be the first token of a row.
    """
    rows, columns = batch.response_mask.nonzero(as_tuple=True)  # [N] each
    if bool((columns == 0).any()):
        raise ValueError("a response cannot be the first token of a row: there is no state it was chosen from")
    picked = hidden[rows, columns - 1]  # [N, H]
    targets = batch.input_ids[rows, columns]  # [N]
    vocabulary = int(cast(Any, head).weight.shape[0])
    size = max(chunk_elements // vocabulary, 1)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, picked.shape[0], size):
        arguments = (head, picked[start : start + size], targets[start : start + size], temperature, softcap)
        # One chunk is within the budget whether or not it is kept, so it need not be computed twice.
        keep = picked.shape[0] <= size or not torch.is_grad_enabled()
        logprob, entropy = _chunk(*arguments) if keep else checkpoint(_chunk, *arguments, use_reentrant=False)
        logprobs.append(logprob)
        entropies.append(entropy)
    shape = batch.input_ids.shape
    zeros = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
    if not logprobs:
        return TokenScores(logprobs=zeros, entropies=zeros)
    return TokenScores(
        logprobs=zeros.index_put((rows, columns), torch.cat(logprobs)),
        entropies=zeros.index_put((rows, columns), torch.cat(entropies)),
    )


def _chunk(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()  # [N, V]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature
    normalised = torch.log_softmax(logits, dim=-1)
    logprob = normalised.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(normalised.exp() * normalised.masked_fill(normalised == -torch.inf, 0.0)).sum(-1)
    return logprob, entropy


def token_values(head: nn.Module, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(values [B, T], bootstrap [B]): what the critic thinks of the prefix before each response token, and of the whole
    row where it was truncated. Zero elsewhere."""
    every = head(hidden).squeeze(-1).float()  # [B, T]: value of the prefix that ends with token t
    before = torch.cat([torch.zeros_like(every[:, :1]), every[:, :-1]], dim=1)
    values = before.masked_fill(~batch.response_mask, 0.0)
    last = (batch.lengths - 1).clamp(min=0)
    whole = every.gather(1, last[:, None]).squeeze(1)
    return values, whole.masked_fill(~batch.truncated, 0.0)
