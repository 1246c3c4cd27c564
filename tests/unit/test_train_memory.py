"""The memory plan: its parts against what torch really keeps, its choices, and its refusal."""

from pathlib import Path

import pytest
import torch

from turnwise.algos.table import build_algorithm
from turnwise.config.schema import AlgoConfig, Config, ModelConfig, RolloutConfig, TrainConfig
from turnwise.generate.hf import HFGenerator
from turnwise.models.memory import ModelShape, plan_memory, plan_run, planned, taken_by_others
from turnwise.models.packing import Packed, packed_passes
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.optim import Masters

GIB = 2**30
SMOL = ModelShape(
    parameters=135_000_000,
    trained=135_000_000,
    trunk=106_000_000,
    layers=30,
    hidden=576,
    intermediate=1536,
    query=576,
    key=192,
    vocabulary=49152,
    context=8192,
)
QWEN = ModelShape(
    parameters=1_544_000_000,
    trained=1_544_000_000,
    trunk=1_544_000_000,
    layers=28,
    hidden=1536,
    intermediate=8960,
    query=1536,
    key=256,
    vocabulary=151936,
    context=32768,
)


def kept_bytes(model: torch.nn.Module, packed: Packed) -> int:
    """What autograd keeps of a forward pass, parameters and inputs left out."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        packed_passes(model),
    ):
        out = model(**packed.arguments(), use_cache=False).last_hidden_state
    del out
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_activations_are_foreseen(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(
        kind,
        hidden_size=96,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        intermediate_size=256,
        head_dim=16,
    )
    shape = ModelShape.of(model)
    Masters(model.parameters(), dtype)
    tokens = 256
    packed = Packed(
        input_ids=torch.arange(tokens)[None] % 250,
        position_ids=torch.arange(tokens)[None],
        rows=torch.zeros(tokens, dtype=torch.long),
        boundaries=torch.tensor([0, tokens], dtype=torch.int32),
        longest=tokens,
    )
    foreseen = shape.token_bytes(dtype.itemsize, checkpointing=False) * tokens
    real = kept_bytes(model.get_decoder(), packed)
    assert 0.8 * real < foreseen < 1.6 * real, (foreseen / real, kind, dtype)


def test_the_cache_is_what_the_generator_allocates() -> None:
    import asyncio

    from turnwise.generate.base import Sampling, Session

    model = tiny_model()
    generator = HFGenerator(model, tiny_tokenizer(), slots=3, max_context=40)
    asyncio.run(generator.generate(Session(key="a", seed=1), [1, 2, 3], Sampling(max_tokens=2)))
    assert generator.cache_bytes == ModelShape.of(model).cache_bytes(4, slots=3, context=40)


def test_counts_are_the_models_own() -> None:
    model = tiny_model(tie_word_embeddings=True)
    shape = ModelShape.of(model)
    assert shape.parameters == shape.trained == model.num_parameters()
    assert shape.trunk == sum(p.numel() for p in model.get_decoder().parameters())
    assert ModelShape.of(model, rank=2).trained < shape.trained


def test_more_is_given_up_the_less_memory_there_is() -> None:
    def ways(shape: ModelShape, gib: float) -> tuple[bool, bool]:
        plan = plan_memory(
            shape,
            budget=int(gib * GIB),
            dtype=torch.bfloat16,
            slots=256,
            context=1024,
            critic="separate",
        )
        assert max(plan.update_bytes, plan.rollout_bytes) <= gib * GIB
        assert plan.micro_batch_tokens >= 1024
        return plan.gradient_checkpointing, plan.free_cache

    assert ways(SMOL, 139) == (False, False)
    assert ways(SMOL, 24) == (True, False)
    assert ways(QWEN, 139) == (False, False)
    assert ways(QWEN, 80) == (True, False)
    assert ways(SMOL, 12) == (True, True), "keys and values are given back before nothing fits"
    with pytest.raises(ValueError, match="does not fit"):
        ways(SMOL, 8)  # the rollout alone takes more


def test_what_does_not_fit_is_refused_with_what_to_lower() -> None:
    with pytest.raises(
        ValueError, match=r"does not fit(.|\n)*Adam's moments(.|\n)*rollout.slots"
    ) as refused:
        plan_memory(QWEN, budget=16 * GIB, dtype=torch.bfloat16, slots=256, context=1024)
    assert "model.lora.rank" in str(refused.value)
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        plan_memory(
            SMOL,
            budget=24 * GIB,
            dtype=torch.bfloat16,
            slots=64,
            context=1024,
            micro_batch_tokens=10**6,
            gradient_checkpointing=False,
        )


def test_what_was_asked_for_is_kept() -> None:
    plan = plan_memory(
        SMOL,
        budget=139 * GIB,
        dtype=torch.bfloat16,
        slots=64,
        context=1024,
        micro_batch_tokens=4096,
        gradient_checkpointing=True,
    )
    assert (plan.micro_batch_tokens, plan.gradient_checkpointing) == (4096, True)


def test_a_run_is_planned_without_its_weights(tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path)  # no weights beside it
    config = Config(
        model=ModelConfig(path=str(tmp_path)),
        rollout=RolloutConfig(slots=4, max_context=64),
        train=TrainConfig(device="cpu"),
    )
    plan = plan_run(config, build_algorithm(AlgoConfig(name="bi_level_gae")))
    assert plan.budget is None
    assert plan.held["weights"] > 4 * tiny_model().num_parameters()
    assert any("keys and values" in line for line in plan.lines())
    _, filled = planned(config, build_algorithm(config.algo))
    assert filled.train.micro_batch_tokens == 16384
    assert filled.model.gradient_checkpointing is False


def test_the_embedded_model_needs_no_plan() -> None:
    plan, filled = planned(Config(), build_algorithm(AlgoConfig()))
    assert plan is None
    assert filled.model.gradient_checkpointing is False
    assert filled.train.micro_batch_tokens == 16384


def test_memory_that_other_processes_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a GPU that another run had just left: nothing that the message says to lower
    would have helped."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (33 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * GIB)
    told = taken_by_others(torch.device("cuda"))
    assert "hold 105.00 GiB of the device's 140.00 GiB" in told
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (137 * GIB, 140 * GIB))
    assert taken_by_others(torch.device("cuda")) == ""
    assert taken_by_others(torch.device("cpu")) == ""
