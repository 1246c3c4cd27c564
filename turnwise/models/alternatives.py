# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Alternatives to sampled tokens: the likeliest tokens at each position."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from turnwise.models.scoring import at_temperature, chunk_elements, head_of, trunk_of


@torch.no_grad()
def likeliest(
    model: Any, before: Sequence[int], said: Sequence[int], *, temperature: float, most: int = 5
) -> list[list[tuple[int, float]]]:
    """For every token of `said`, the likeliest tokens in its place with their probabilities, the
    likeliest first.

    Args:
        before: the ids that the model had read.
        temperature: of the sampling. 0, which takes the likeliest, shows the model's own
            distribution.

    Example:
        >>> from turnwise.testing.tiny import tiny_model
        >>> first, second = likeliest(tiny_model(), [1, 2, 3], [4, 5], temperature=1.0, most=2)
        >>> first[0][1] >= first[1][1] > 0
        True
    """
    weight = next(model.parameters())
    ids = torch.tensor([[*before, *said]], device=weight.device)
    states = cast(Any, trunk_of(model))(input_ids=ids, use_cache=False).last_hidden_state[0]
    states = states[len(before) - 1 : -1]  # [R, H]: token t is chosen from the state at t - 1
    head = head_of(model)
    softcap = vars(model.config).get("final_logit_softcapping")
    size = max(chunk_elements(weight.device) // int(cast(Any, head).weight.shape[0]), 1)
    found: list[list[tuple[int, float]]] = []
    for start in range(0, states.shape[0], size):
        logits = at_temperature(head(states[start : start + size]), temperature or 1.0, softcap)
        top = torch.softmax(logits, dim=-1).topk(min(most, logits.shape[-1]), dim=-1)
        for tokens, shares in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            found.append(list(zip(tokens, shares, strict=True)))
    return found
