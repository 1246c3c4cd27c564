"""Scores: the same numbers as the whole logits give, without ever holding them."""

import pytest
import torch
from train_parts import batch, policy

from turnwise.data.batch import Batch
from turnwise.models.policy import Policy, Precision, add_lora, make_critic, make_reference, prepare
from turnwise.models.scoring import head_of, hidden_states, token_scores, trunk_of
from turnwise.testing.tiny import ModelKind, tiny_model


def widened(rows: Batch, extra: int) -> Batch:
    """The batch with more padding on the right."""

    def pad(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, extra), value=value)

    fills = {"input_ids": 99, "turn_ids": -1, "state_ids": -1}
    return rows.replace(
        **{name: pad(t, fills.get(name, 0)) for name, t in rows.tensors().items() if t.dim() == 2}
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_the_models_own_logits(kind: str, temperature: float) -> None:
    ours, rows = policy(kind, temperature=temperature), batch()
    with torch.no_grad():
        scores = ours.score(rows)
        logits = ours.model(input_ids=rows.input_ids).logits / temperature
    every = torch.log_softmax(logits.float(), -1)
    for row, column in rows.response_mask.nonzero().tolist():
        before = every[row, column - 1]
        assert scores.logprobs[row, column].item() == pytest.approx(
            before[rows.input_ids[row, column]].item(), abs=1e-5
        )
        assert scores.entropies[row, column].item() == pytest.approx(
            -(before.exp() * before).sum().item(), abs=1e-4
        )
    assert not scores.logprobs[~rows.response_mask].any()


def test_chunks_change_neither_scores_nor_gradients() -> None:
    ours, rows = policy(critic=None), batch()
    hidden = hidden_states(trunk_of(ours.model), rows).detach()
    found = []
    for elements in (10**9, 259 * 2, 1):
        leaf = hidden.clone().requires_grad_()
        scores = token_scores(
            head_of(ours.model), leaf, rows, temperature=0.8, chunk_elements=elements
        )
        (scores.logprobs.sum() + 0.3 * scores.entropies.sum()).backward()
        found.append((scores.logprobs.detach(), leaf.grad))
    for logprobs, grad in found[1:]:
        torch.testing.assert_close(logprobs, found[0][0])
        torch.testing.assert_close(grad, found[0][1])


def test_no_tensor_over_all_positions_and_the_vocabulary_exists() -> None:
    ours, rows = policy(critic=None), batch()
    vocabulary, limit = 259, 3
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                # [32, 259] is the projection's own weight or its gradient: 32 is the model's width,
                # not positions.
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.shape[-1:] == (259,)
                    and tensor.shape != (32, 259)
                ):
                    largest = max(largest, tensor.numel() // vocabulary)
            return out

    hidden = hidden_states(trunk_of(ours.model), rows)
    with Watch():
        scores = token_scores(
            head_of(ours.model), hidden, rows, temperature=1.0, chunk_elements=limit * vocabulary
        )
        scores.logprobs.sum().backward()
    assert 0 < largest <= limit < int(rows.response_mask.sum())


def test_padding_reaches_nothing() -> None:
    ours, rows = policy(), batch()
    with torch.no_grad():
        plain, wide = ours.score(rows).logprobs, ours.score(widened(rows, 5)).logprobs
        values, bootstrap = ours.value(rows)
        wide_values, wide_bootstrap = ours.value(widened(rows, 5))
        alone = ours.score(rows.select(torch.tensor([3]))).logprobs
    torch.testing.assert_close(wide[:, : plain.shape[1]], plain)
    torch.testing.assert_close(wide_values[:, : plain.shape[1]], values)
    torch.testing.assert_close(wide_bootstrap, bootstrap)
    torch.testing.assert_close(alone[0], plain[3, : alone.shape[1]])


def test_a_value_is_that_of_the_prefix_before_its_token() -> None:
    ours, rows = policy(), batch()
    assert ours.critic is not None
    with torch.no_grad():
        values, bootstrap = ours.value(rows)
        hidden = ours.critic.trunk(input_ids=rows.input_ids[:1, :2]).last_hidden_state[:, -1]
        whole = ours.critic.trunk(input_ids=rows.input_ids[2:3, :8]).last_hidden_state[:, -1]
        # Ids [1 2] come before token 2.
        torch.testing.assert_close(values[0, 2], ours.critic.head(hidden)[0, 0])
        torch.testing.assert_close(bootstrap[2], ours.critic.head(whole)[0, 0])
    assert bootstrap[[0, 1, 3, 4]].eq(0).all(), "only the truncated row is bootstrapped"
    assert not values[~rows.response_mask].any()


def test_adapters_switched_off_are_the_reference() -> None:
    base = prepare(tiny_model())
    frozen = make_reference(base)
    adapted = add_lora(base, _lora(), seed=0)
    cpu = Precision.choose("auto", device="cpu")
    ours = Policy(
        adapted,
        None,
        precision=cpu,
        critic=make_critic(adapted, shared=False),
        adapter_reference=True,
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
        rows = batch()
        moved, reference = ours.score(rows).logprobs, ours.reference_logprobs(rows)
        first = Policy(frozen, None, precision=cpu).score(rows).logprobs
    torch.testing.assert_close(reference, first)
    assert (moved - first).abs().max() > 0.01
    assert all(
        "lora" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad
    )


def _lora():
    from turnwise.config.schema import LoraConfig

    return LoraConfig(rank=2)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_mode_scores_without_dropout(kind: ModelKind) -> None:
    names = ["resid_pdrop", "embd_pdrop", "attn_pdrop"] if kind == "gpt2" else ["attention_dropout"]
    model = prepare(tiny_model(kind, **dict.fromkeys(names, 0.5)))
    ours = Policy(model, None, precision=Precision.choose("auto", device="cpu"))
    rows = batch()
    with torch.no_grad():
        expected = ours.score(rows).logprobs
        ours.train_mode(True)
        found = ours.score(rows).logprobs
    torch.testing.assert_close(found, expected)


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        Precision.choose("float16", device="cpu")
