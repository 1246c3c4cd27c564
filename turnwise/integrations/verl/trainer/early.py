"""rollout.enough_groups on verl: a step is sampled once enough groups are over."""

from typing import Any

TRAIN = "train"
"""verl's partition of training episodes."""


class EarlySampling:
    """Lets verl's replay buffer sample a training step as soon as `enough` groups are over. All
    groups that are over by then are sampled, and the others are `late`. None: verl waits for all.
    """

    def __init__(self, buffer: Any, *, enough: int | None) -> None:
        self.late: list[str] = []
        """The uids of the groups that the last sample did not wait for."""
        if enough is None:
            return
        sample, select = buffer.sample, buffer._select_prompt_uids

        def sample_early(global_steps: int, partition_id: str, batch_size: int) -> Any:
            size = enough if partition_id == TRAIN else batch_size
            return sample(global_steps=global_steps, partition_id=partition_id, batch_size=size)

        def select_all(partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
            if partition_id == TRAIN:
                batch_size = len(sampleable_keys)
                self.late = sorted(buffer.pending_keys[TRAIN] | buffer.running_keys[TRAIN])
            return select(partition_id, sampleable_keys, batch_size)

        buffer.sample, buffer._select_prompt_uids = sample_early, select_all
