"""CustomRayPPOTrainer and its parts: an environment object, a tokenizer and a config, and verl does the rest."""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from turnwise.chat.render import Renderer
from turnwise.config.schema import Config
from turnwise.envs.adapters import as_env
from turnwise.envs.base import Env, EnvFactory
from turnwise.envs.registry import make_env
from turnwise.integrations.verl.config.resolve import resolve, to_config
from turnwise.integrations.verl.config.sections import open_section
from turnwise.integrations.verl.config.settings import MODE, Placement
from turnwise.seeding import derive_seed
from turnwise.types import Message, Task


class MultiTurnEngine(Protocol):
    """Plays on from a first reply."""

    def run_episode(self, env: Env, response: str) -> float:
        """The episode's reward, where the model's first reply was `response`. The environment is reset."""
        ...


def environment_factory(environment: Any, config: Config) -> EnvFactory:
    """Makes fresh environments of what a user calls one: a name, a class, a factory, or an object (which is copied)."""
    if isinstance(environment, str):
        return lambda: make_env(config.env.model_copy(update={"name": environment}))
    name = environment_name(environment)

    def make() -> Env:
        fresh = environment(**config.env.options) if isinstance(environment, type) else copy.deepcopy(environment)
        return as_env(fresh, config=config.env, name=name)

    return make


def environment_name(environment: Any) -> str:
    """The name of an environment that is given as a class or an object: its class's.

    Example:
        >>> environment_name(int), environment_name(3)
        ('int', 'int')
    """
    return environment.__name__ if isinstance(environment, type) else type(environment).__name__


class CustomEnvironmentDataset(Dataset[dict[str, Any]]):
    """An environment's tasks as verl's data set: prompts from `reset`, rendered and tokenised.

    Example:
        >>> from turnwise.envs.games.simple_game import SimpleGameEnvironment
        >>> from turnwise.testing.tiny import tiny_tokenizer
        >>> rows = CustomEnvironmentDataset(SimpleGameEnvironment(), tiny_tokenizer(), size=4, max_length=512)
        >>> len(rows), sorted(rows[0])[:3], rows[0]["input_ids"].shape
        (4, ['agent_name', 'attention_mask', 'data_source'], torch.Size([512]))
    """

    def __init__(
        self,
        environment: Any,
        tokenizer: Any,
        *,
        config: Config | None = None,
        size: int | None = None,
        split: str = "train",
        max_length: int = 1024,
    ) -> None:
        self.config = config or Config(backend="verl")
        groups = self.config.rollout.train
        self.split = split
        self._size = size or (2 * self.config.train.steps * groups.env_groups if split == "train" else 1)
        self._groups = groups.env_groups if split == "train" else self._size
        self._env = environment_factory(environment, self.config)()
        self._renderer = Renderer(tokenizer)
        self._pad = tokenizer.pad_token_id
        self._max_length = max_length

    def __len__(self) -> int:
        return self._size

    def task(self, index: int) -> Task:
        """The task of one row: the one that its agents play."""
        moment, group = divmod(index, self._groups) if self.split == "train" else (0, index)
        return self._env.make_task(derive_seed(self.config.seed, f"task/{self.split}", moment, group), self.split)

    def row(self, index: int) -> dict[str, Any]:
        """What verl's V1 trainer needs of a row; its agents tokenise on their own."""
        opening = self._env.reset(self.task(index), 0)
        return {
            "raw_prompt": [message.to_json() for message in opening.messages],
            "agent_name": MODE,
            "data_source": self.split,
            "split": self.split,
            "index": index,
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index},
            "row_tensor": torch.zeros(1, dtype=torch.uint8),
        }

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        row = self.row(index)
        messages = [Message.from_json(message) for message in row["raw_prompt"]]
        ids = self._renderer.encode(self._renderer.prompt(messages))
        if len(ids) > self._max_length:
            raise ValueError(
                f"the prompt of row {index} has {len(ids)} ids and max_length is {self._max_length}; raise max_length"
            )
        space = self._max_length - len(ids)
        mask = torch.tensor([0] * space + [1] * len(ids))
        return row | {
            "input_ids": torch.tensor([self._pad] * space + list(ids)),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
        }


class _RowsOnly(Dataset[dict[str, Any]]):
    """The same rows without padded prompts, which verl's V1 trainer would carry along for nothing."""

    def __init__(self, rows: CustomEnvironmentDataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows.row(index)


class EnvironmentRewardWrapper:
    """verl's reward function on top of an environment: reset to the row's task, step with the reply, return the reward.

    Args:
        environment: a name, a class, a factory or an object.
        tokenizer: turns the sampled ids into the reply's text.
        reward_fn: `fn(reward, observation, info)` in place of the step's own reward.
        multi_turn_engine: plays the whole episode from the first reply on, in place of a single step.

    Called with a DataProto whose rows name their task (`index`, `split`); returns a tensor [B].
    """

    def __init__(
        self,
        environment: Any,
        tokenizer: Any,
        *,
        config: Config | None = None,
        reward_fn: Callable[[float, str, dict[str, Any]], float] | None = None,
        multi_turn_engine: MultiTurnEngine | None = None,
    ) -> None:
        if reward_fn is not None and multi_turn_engine is not None:
            raise ValueError("reward_fn judges a single step and multi_turn_engine plays many; give one of them")
        self.config = config or Config(backend="verl")
        self._make = environment_factory(environment, self.config)
        self._tasks = CustomEnvironmentDataset(environment, tokenizer, config=self.config)
        self._tokenizer = tokenizer
        self._reward_fn = reward_fn
        self._engine = multi_turn_engine

    def __call__(self, data: Any) -> torch.Tensor:
        rewards = [self._reward(data, row) for row in range(len(data))]
        return torch.tensor(rewards, dtype=torch.float32)

    def _reward(self, data: Any, row: int) -> float:
        mask = data.batch["response_mask"][row].bool()
        text = self._tokenizer.decode(data.batch["responses"][row][mask].tolist(), skip_special_tokens=True)
        split, index = str(data.non_tensor_batch["split"][row]), int(data.non_tensor_batch["index"][row])
        if split != "train":
            raise ValueError(f"rewards are computed for training rows, got split {split!r}")
        env = self._make()
        try:
            env.reset(self._tasks.task(index), 0)
            if self._engine is not None:
                return float(self._engine.run_episode(env, text))
            result = env.step(Message(role="assistant", content=text))
        finally:
            env.close()
        observation = "\n".join(message.content for message in result.messages)
        if self._reward_fn is None:
            return result.reward
        return float(self._reward_fn(result.reward, observation, dict(result.info)))


def replace_loaders(trainer: Any, train: Any, val: Any) -> None:
    """Puts a user's data sets behind the trainer's loaders, where given."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    data = trainer.config.data
    if train is not None:
        rows = _RowsOnly(train) if isinstance(train, CustomEnvironmentDataset) else train
        trainer.train_dataset = rows
        trainer.train_dataloader = StatefulDataLoader(
            dataset=rows,
            batch_size=data.get("gen_batch_size", None) or data.train_batch_size,
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=create_rl_sampler(data, rows),
        )
    if val is not None:
        rows = _RowsOnly(val) if isinstance(val, CustomEnvironmentDataset) else val
        trainer.val_dataset = rows
        trainer.val_dataloader = StatefulDataLoader(
            dataset=rows,
            batch_size=data.val_batch_size or len(rows),
            num_workers=data.dataloader_num_workers,
            shuffle=False,
            drop_last=False,
            collate_fn=collate_fn,
        )


def _create_verl_config(config: Any, *, placement: Placement | None = None, tokenizer: Any = None) -> Any:
    """verl's whole OmegaConf config of a ConfigStore (or anything else that is a config here), and a run directory for
    it. AgentTrainer takes it as it is."""
    from turnwise.integrations.verl.faults.cluster import find_placement

    placement = placement or find_placement(device=to_config(config).train.device)
    verl_config, _, recorder = resolve(config, tokenizer=tokenizer, factories={}, placement=placement)
    recorder.close()
    with open_section(verl_config) as section:
        section.run_dir = str(recorder.path)
    return verl_config


def _trainer_class() -> type:
    from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer

    class CustomRayPPOTrainer(AgentTrainer):
        """verl's PPO on an environment object.

        Episodes have many turns and the environment rewards them. With `reward_fn` or `multi_turn_engine`, the model
        gives one reply per episode, and EnvironmentRewardWrapper rewards it.
        """

        def __init__(
            self,
            config: Any,
            environment: Any,
            tokenizer: Any,
            *,
            reward_fn: Callable[[float, str, dict[str, Any]], float] | None = None,
            multi_turn_engine: MultiTurnEngine | None = None,
            role_worker_mapping: Any = None,
            resource_pool_manager: Any = None,
            agent_cls: Any = None,
        ) -> None:
            ours = to_config(config)
            single = reward_fn is not None or multi_turn_engine is not None
            if single:
                ours = ours.model_copy(update={"train": ours.train.model_copy(update={"multi_turn": False})})
            name = environment if isinstance(environment, str) else environment_name(environment)
            ours = ours.model_copy(update={"env": ours.env.model_copy(update={"name": name})})
            given = {} if isinstance(environment, str) else {name: environment_factory(environment, ours)}
            wrapper = EnvironmentRewardWrapper(
                environment, tokenizer, config=ours, reward_fn=reward_fn, multi_turn_engine=multi_turn_engine
            )
            super().__init__(
                ours,
                tokenizer,
                role_worker_mapping,
                resource_pool_manager,
                agent_cls,
                reward_fn=wrapper if single else None,
                factories=given,
                train_dataset=CustomEnvironmentDataset(environment, tokenizer, config=ours),
                val_dataset=CustomEnvironmentDataset(
                    environment, tokenizer, config=ours, split="val", size=ours.eval.episodes
                ),
            )
            self.environment = environment

        def fit(self, agent_loop_manager: Any = None) -> None:
            """Starts the workers where they are not started, and trains to the last step."""
            if agent_loop_manager is None and getattr(self, "agent_loop_manager", None) is None:
                self.init_workers()
            super().fit(agent_loop_manager)

    return CustomRayPPOTrainer


def create_trainer(config: Any, environment: Any, tokenizer: Any, **options: Any) -> Any:
    """A CustomRayPPOTrainer that is ready to `fit`. `options` are its keyword arguments."""
    return _trainer_class()(config, environment, tokenizer, **options)


def __getattr__(name: str) -> Any:
    if name == "CustomRayPPOTrainer":  # its base class is verl's, so it exists only where verl does
        globals()[name] = _trainer_class()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
