"""vLLM through TRL's own engine, with a stand-in for vLLM itself: rounds, weights, corrections, the fallback."""

import pytest
import torch
from trl_parts import curve, make_trainer

pytestmark = pytest.mark.timeout(200)


class StandIn:
    """Answers like TRL's VLLMGeneration: ids and top log-probs for every prompt, `num_generations` of them each."""

    def __init__(self, *, empty_every=0):
        self.synced = 0
        self.sizes = []
        self._empty_every = empty_every
        self._count = 0
        self._generator = torch.Generator().manual_seed(0)

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images=None, num_generations=1, profiler=None):
        assert num_generations == 1
        self.sizes.append(len(prompts))
        ids = []
        for _ in prompts:
            self._count += 1
            empty = self._empty_every and self._count % self._empty_every == 0
            ids.append([] if empty else torch.randint(0, 128, (6,), generator=self._generator).tolist())
        return prompts, ids, [[[-5.0] for _ in reply] for reply in ids], None


def with_vllm(tmp_path, stand_in, **changes):
    trainer = make_trainer(tmp_path, **changes)
    trainer.args.use_vllm = trainer.use_vllm = True  # the constructor would want the package
    trainer.vllm_generation = stand_in
    trainer._last_loaded_step = -1
    return trainer


def test_rounds_weights_and_correction(tmp_path):
    stand_in = StandIn()
    trainer = with_vllm(tmp_path, stand_in, max_steps=3)
    trainer.train()
    assert stand_in.synced == 3
    assert stand_in.sizes == [8] * 9  # three turns of everybody, in lockstep where nobody is late
    assert all(torch.isfinite(torch.tensor(curve(trainer, "loss"))))
    assert "sampling/importance_sampling_ratio/mean" in trainer.state.log_history[0]
    assert curve(trainer, "rollout/reply_tokens") == [2.0] * 3  # cut where max_tokens_per_turn ends


def test_async_falls_back_with_a_warning(tmp_path):
    trainer = with_vllm(tmp_path, StandIn(), enable_async_generation=True)
    with pytest.warns(UserWarning, match="async generation is off"):
        trainer.train()
    assert not trainer.async_generation
    assert curve(trainer, "rollout/staleness_max") == [0.0, 0.0]


def test_an_empty_completion_is_a_failure_of_its_episode(tmp_path):
    trainer = with_vllm(tmp_path, StandIn(empty_every=5), max_steps=1, episode_retries=0)
    trainer.train()
    assert 0 < curve(trainer, "rollout/failures")[0] < 8
    assert curve(trainer, "rollout/status/generator_error")[0] > 0


def test_local_engine_is_refused_beside_vllm(tmp_path):
    trainer = with_vllm(tmp_path, StandIn(), engine="local")
    with pytest.raises(ValueError, match="use_vllm is on"):
        trainer.train()
