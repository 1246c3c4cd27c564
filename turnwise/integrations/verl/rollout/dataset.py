"""The data set of verl's loader: rows name a group of episodes. Tasks are created where they are
played."""

from typing import Any

import torch
from torch.utils.data import Dataset

from turnwise.integrations.verl.config.settings import MODE


class EnvDataset(Dataset[dict[str, Any]]):
    """Row i is group i of the split. verl gives train_files or val_files as `data_files`: the
    split's name.

    Example:
        >>> rows = EnvDataset("val", max_samples=3)
        >>> len(rows), rows[2]["split"], rows[2]["index"]
        (3, 'val', 2)
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        split = data_files if isinstance(data_files, str) else next(iter(data_files))
        if split not in ("train", "val"):
            raise ValueError(
                "an EnvDataset has the splits train and val; data.*_files must name one, got "
                f"{split!r}"
            )
        if max_samples < 1:
            raise ValueError(
                f"data.{split}_max_samples is the number of groups, 1 at least, got {max_samples}"
            )
        self.split = split
        self._rows = max_samples

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [
                {"role": "user", "content": ""}
            ],  # placeholder; the prompt comes from the environment's reset
            "agent_name": MODE,
            "data_source": self.split,
            "split": self.split,
            "index": index,
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index},
            "row_tensor": torch.zeros(1, dtype=torch.uint8),  # verl's batches need one tensor
        }
