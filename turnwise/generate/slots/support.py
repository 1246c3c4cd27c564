# pyright: reportUnknownMemberType=false
"""Checks whether a model can run over the slot cache, from its config and by a trial."""

from typing import Any

import torch
from transformers import PreTrainedModel

from turnwise.generate.base import Sampling
from turnwise.generate.scheduler import SessionState
from turnwise.generate.slots.passes import SlotPasses, inference
from turnwise.models.attention import unroutable


def vocab_size(model: PreTrainedModel) -> int:
    """How many ids the model can read."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def unsupported(model: PreTrainedModel, *, max_context: int) -> str | None:
    """The reason why the model cannot keep its state in slots, or None if it can.

    Flags in transformers are not reliable, so a trial decides: a short context, prefilled and then
    decoded through the slots, must give the logits of the plain model.

    Example:
        >>> from turnwise.testing.tiny import tiny_model
        >>> unsupported(tiny_model("qwen3"), max_context=64) is None
        True
    """
    reason = unroutable(model)
    if reason is not None:
        return reason
    settings: dict[str, Any] = model.config.get_text_config().to_dict()
    return _trial(model, settings=settings, max_context=max_context)


def _trial(model: PreTrainedModel, *, settings: dict[str, Any], max_context: int) -> str | None:
    """Prefills 4 ids and decodes 3, and compares each step with a plain forward pass."""
    vocab = vocab_size(model)
    ids = [(31 * i + 7) % vocab for i in range(min(8, max_context))]
    passes = SlotPasses(model, slots=2, length=len(ids), exact=False)
    state = SessionState(key="trial", seed=0, slot=0)
    state.ask(ids[:4], sampling=Sampling(max_tokens=1, temperature=0.0), chunk=4)
    weight = next(model.parameters())
    tolerance = 1e-3 if weight.dtype == torch.float32 else 0.1
    try:
        with inference(model):
            plain = (
                model(input_ids=torch.tensor([ids], device=weight.device), use_cache=False)
                .logits[0]
                .float()
            )
            expected = plain.log_softmax(-1)
            _, logprobs = passes.prefill([state], size=16, num_rows=1)
            found = [logprobs[0]]
            for token in ids[4:]:
                state.advance()
                state.ids.append(token)
                state.decode_last()
                found.append(passes.decode([state])[1][0])
    except Exception as error:
        # An unknown model may raise anything here; then it is not supported.
        return f"a trial raised {error!r}"
    # Greedy draws report the largest log-prob of each step: one number that depends on every logit.
    wanted = expected[3:].max(-1).values.tolist()
    gap = max(abs(a - b) for a, b in zip(wanted, found, strict=True))
    if not gap <= tolerance * max(1.0, float(plain.abs().max())):
        return f"a trial differs from the plain forward pass by {gap:.3g} in log-prob"
    window = int(settings.get("sliding_window") or max_context)
    slides = "sliding_attention" in (settings.get("layer_types") or ["sliding_attention"])
    if slides and window < max_context and not passes.windows:
        return "its sliding window is not handed to the attention function"
    return None
