"""It must learn: three turns from chance to above 0.9 of the maximum, synchronously and ahead of
training."""

import pytest
from trl_parts import curve, make_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("credit", ["group_relative", "turn_level"])
def test_three_turns(tmp_path, credit, ahead):
    trainer = make_trainer(
        tmp_path,
        credit=credit,
        enable_async_generation=ahead,
        max_steps=50 if ahead else 35,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        max_tokens_per_turn=1,
        per_device_train_batch_size=64,
        num_generations=16,
        store_episodes=False,
    )
    trainer.train()
    trainer.close()
    rewards = curve(trainer)
    assert rewards[0] < 0.45  # a quarter of all tokens begins in the wanted half
    assert sum(rewards[-5:]) / 5 > 0.9
    if ahead:
        assert min(curve(trainer, "rollout/staleness")[1:]) > 0
