# pyright: reportUnknownVariableType=false
"""CustomRayPPOTrainer: verl's PPO from an environment object, a tokenizer and a config."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from turnwise.chat.render import Renderer
from turnwise.config.schema import Config
from turnwise.envs.base import Env, EnvFactory
from turnwise.envs.registry import make_env
from turnwise.integrations.verl.config.carried import CarriedEnv
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.config.resolve import resolve, to_config
from turnwise.integrations.verl.config.sections import open_section
from turnwise.integrations.verl.config.settings import MODE
from turnwise.isolation.local import LocalPool
from turnwise.seeding import derive_seed
from turnwise.types import Message, Task


class MultiTurnEngine(Protocol):
    """Plays on from a first reply."""

    def run_episode(self, env: Env, response: str) -> float:
        """The episode's reward, where the model's first reply was `response`. The environment is
        reset."""
        ...


def environment_factory(environment: Any, config: Config) -> EnvFactory:
    """A factory of environments from a name, a class, a factory, or an object (which is copied)."""
    if isinstance(environment, str):
        return lambda: make_env(config.env.model_copy(update={"name": environment}))
    called = isinstance(environment, type) or inspect.isroutine(environment)
    return CarriedEnv(
        source=environment,
        config=config.env,
        name=environment_name(environment),
        options=config.env.options if called else None,
    )


def environment_name(environment: Any) -> str:
    """The name of an environment that is given as a class, a function or an object (its class's).

    Example:
        >>> environment_name(int), environment_name(3)
        ('int', 'int')
    """
    named = isinstance(environment, type) or inspect.isroutine(environment)
    owner: Any = environment if named else type(environment)
    return owner.__name__


class CustomEnvironmentDataset(Dataset[dict[str, Any]]):
    """An environment's tasks as verl's data set: prompts from `reset`, rendered and tokenised.

    Example:
        >>> from turnwise.envs.games.simple_game import SimpleGameEnvironment
        >>> from turnwise.testing.tiny import tiny_tokenizer
        >>> rows = CustomEnvironmentDataset(SimpleGameEnvironment(), tiny_tokenizer(), size=4,
        ...     max_length=512)
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
        self._size = size or (
            2 * self.config.train.steps * groups.env_groups if split == "train" else 1
        )
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
        return self._env.make_task(
            derive_seed(self.config.seed, f"task/{self.split}", moment, group), self.split
        )

    def row(self, index: int) -> dict[str, Any]:
        """The fields of a row that verl's V1 trainer needs; its agents tokenise themselves."""
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
                f"the prompt of row {index} has {len(ids)} ids and max_length is "
                f"{self._max_length}; raise max_length"
            )
        space = self._max_length - len(ids)
        mask = torch.tensor([0] * space + [1] * len(ids))
        return row | {
            "input_ids": torch.tensor([self._pad] * space + list(ids)),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
        }


class _RowsOnly(Dataset[dict[str, Any]]):
    """The same rows without padded prompts, which verl's V1 trainer would carry along for
    nothing."""

    def __init__(self, rows: CustomEnvironmentDataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows.row(index)


StepJudge = Callable[[float, str, dict[str, Any]], float]
"""`fn(reward, observation, info)`: a step's reward in place of the environment's."""
BatchJudge = Callable[[Any], torch.Tensor]
"""verl's form, `fn(data)`: rewards of a DataProto's rows, [B] or [B, response length]."""


def judges_steps(reward_fn: Callable[..., Any]) -> bool:
    """True for `fn(reward, observation, info)`, False for verl's `fn(data)`.

    Raises:
        ValueError: it is neither.

    Example:
        >>> judges_steps(lambda reward, observation, info: reward), judges_steps(lambda data: data)
        (True, False)
    """
    parameters = inspect.signature(reward_fn).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(needed) not in (1, 3):
        raise ValueError(
            "reward_fn takes (data) or (reward, observation, info); this one takes "
            f"({', '.join(p.name for p in needed)})"
        )
    return len(needed) == 3


class EnvironmentRewardWrapper:
    """verl's reward function on top of an environment: reset to the row's task, step with the
    reply, return the reward. Rows are played side by side, in `rollout.num_workers` threads, within
    the time limits of `rollout`.

    Args:
        environment: a name, a class, a factory or an object.
        tokenizer: turns the sampled ids into the reply's text. None: the trainer's. A reward
            function may stand in its place: `EnvironmentRewardWrapper(environment, reward_fn)`.
        reward_fn: a StepJudge, in place of the step's own reward; or a BatchJudge, which is called
            as it is.
        config: whose tasks are played. None: the trainer's.
        multi_turn_engine: plays the whole episode from the first reply on, in place of a single
            step. It is called in several threads.

    Called with a DataProto whose rows name their task (`index`, `split`); returns a tensor [B].
    """

    def __init__(
        self,
        environment: Any,
        tokenizer: Any = None,
        reward_fn: StepJudge | BatchJudge | None = None,
        *,
        config: Config | None = None,
        multi_turn_engine: MultiTurnEngine | None = None,
    ) -> None:
        if tokenizer is not None and getattr(tokenizer, "decode", None) is None:
            tokenizer, reward_fn = None, tokenizer
        if reward_fn is not None and multi_turn_engine is not None:
            raise ValueError(
                "reward_fn judges a single step and multi_turn_engine plays many; give one of them"
            )
        self._environment = environment
        self._given = config
        self._judge: Any = reward_fn
        self._by_batch = reward_fn is not None and not judges_steps(reward_fn)
        self._engine = multi_turn_engine
        self._tokenizer: Any = None
        self._tasks: CustomEnvironmentDataset | None = None
        if tokenizer is not None:
            self.bind(tokenizer, config or Config(backend="verl"))

    def bind(self, tokenizer: Any, config: Config) -> None:
        """Sets what was not given: a trainer does so with its own."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer
        if self._tasks is None or self._given is None:
            self.config = self._given or config
            self._tasks = CustomEnvironmentDataset(
                self._environment, self._tokenizer, config=self.config
            )

    def __call__(self, data: Any) -> torch.Tensor:
        if self._by_batch:
            return torch.as_tensor(self._judge(data))
        if self._tasks is None:
            raise ValueError(
                "EnvironmentRewardWrapper has no tokenizer yet: give it one, or give the wrapper "
                "to a trainer as reward_fn"
            )
        return torch.tensor(asyncio.run(self._play(data, self._tasks)), dtype=torch.float32)

    async def _play(self, data: Any, tasks: CustomEnvironmentDataset) -> list[float]:
        rollout = self.config.rollout
        make = environment_factory(self._environment, self.config)
        threads = 1 if rollout.isolation == "inline" else rollout.num_workers
        pool = LocalPool({_TAG: make}, rollout, threads=threads)
        try:
            return await asyncio.gather(
                *(self._reward(data, row, tasks, pool) for row in range(len(data)))
            )
        finally:
            await pool.close()

    async def _reward(
        self, data: Any, row: int, tasks: CustomEnvironmentDataset, pool: LocalPool
    ) -> float:
        mask = data.batch["response_mask"][row].bool()
        text = self._tokenizer.decode(
            data.batch["responses"][row][mask].tolist(), skip_special_tokens=True
        )
        split, index = (
            str(data.non_tensor_batch["split"][row]),
            int(data.non_tensor_batch["index"][row]),
        )
        if split != "train":
            raise ValueError(f"rewards are computed for training rows, got split {split!r}")
        handle = pool.open(_TAG)
        try:
            await handle.reset(tasks.task(index), 0)
            engine, env = self._engine, handle.env
            if engine is not None and env is not None:
                turns = env.max_turns or self.config.train.max_turn
                limit = turns * self.config.rollout.step_timeout
                return float(
                    await pool.call(lambda: engine.run_episode(env, text), limit, "run_episode")
                )
            result = await handle.step(Message(role="assistant", content=text))
        finally:
            await handle.close()
        observation = "\n".join(message.content for message in result.messages)
        if self._judge is None:
            return result.reward
        return float(self._judge(result.reward, observation, dict(result.info)))


_TAG = "environment"


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A user's own parts of verl's loaders; None: verl's."""

    train_dataset: Any = None
    val_dataset: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    train_sampler: Any = None


def replace_loaders(trainer: Any, given: Loading) -> None:
    """Puts a user's data sets, sampler and collate function into the trainer's loaders."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn as verls

    data, collate_fn = trainer.config.data, given.collate_fn or verls
    train, val = given.train_dataset, given.val_dataset
    if given.collate_fn is not None or given.train_sampler is not None:
        train = trainer.train_dataset if train is None else train
    if given.collate_fn is not None:
        val = trainer.val_dataset if val is None else val
    if train is not None:
        rows = _RowsOnly(train) if isinstance(train, CustomEnvironmentDataset) else train
        trainer.train_dataset = rows
        trainer.train_dataloader = StatefulDataLoader(
            dataset=rows,
            batch_size=data.get("gen_batch_size", None) or data.train_batch_size,
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=given.train_sampler or create_rl_sampler(data, rows),
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


def _create_verl_config(  # pyright: ignore[reportUnusedFunction]
    config: Any, *, placement: Placement | None = None, tokenizer: Any = None
) -> Any:
    """verl's whole OmegaConf config of a ConfigStore (or anything else that is a config here), and
    a run directory for it. AgentTrainer takes it as it is."""
    from turnwise.integrations.verl.faults.cluster import find_placement

    placement = placement or find_placement(device=to_config(config).train.device)
    verl_config, _, recorder = resolve(
        config, tokenizer=tokenizer, factories={}, placement=placement
    )
    recorder.close()
    with open_section(verl_config) as section:
        section.run_dir = str(recorder.path)
    return verl_config


def _trainer_class() -> type:
    from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer

    class CustomRayPPOTrainer(AgentTrainer):
        """verl's PPO on an environment object.

        Episodes have many turns and the environment rewards them, or a `reward_fn(data)` in
        verl's form. With `reward_fn(reward, observation, info)` or `multi_turn_engine`, the model
        gives one reply per episode, and EnvironmentRewardWrapper rewards it.
        """

        def __init__(
            self,
            config: Any,
            environment: Any,
            tokenizer: Any,
            *,
            reward_fn: StepJudge | BatchJudge | None = None,
            multi_turn_engine: MultiTurnEngine | None = None,
            role_worker_mapping: Any = None,
            resource_pool_manager: Any = None,
            agent_cls: Any = None,
            collate_fn: Callable[[list[Any]], Any] | None = None,
            train_sampler: Any = None,
            device_name: str | None = None,
            nodes: int = 1,
            gpus: int | None = None,
            address: str | None = None,
        ) -> None:
            ours = to_config(config)
            by_step = reward_fn is not None and judges_steps(reward_fn)
            single = by_step or multi_turn_engine is not None
            if single:
                ours = ours.model_copy(
                    update={"train": ours.train.model_copy(update={"multi_turn": False})}
                )
            name = environment if isinstance(environment, str) else environment_name(environment)
            ours = ours.model_copy(update={"env": ours.env.model_copy(update={"name": name})})
            given = (
                {}
                if isinstance(environment, str)
                else {name: environment_factory(environment, ours)}
            )
            judge: Any = reward_fn
            if single or (reward_fn is not None and multi_turn_engine is not None):
                judge = EnvironmentRewardWrapper(
                    environment,
                    tokenizer,
                    config=ours,
                    reward_fn=reward_fn,
                    multi_turn_engine=multi_turn_engine,
                )
            super().__init__(
                ours,
                tokenizer,
                role_worker_mapping,
                resource_pool_manager,
                agent_cls,
                reward_fn=judge,
                factories=given,
                train_dataset=CustomEnvironmentDataset(environment, tokenizer, config=ours),
                val_dataset=CustomEnvironmentDataset(
                    environment, tokenizer, config=ours, split="val", size=ours.eval.episodes
                ),
                collate_fn=collate_fn,
                train_sampler=train_sampler,
                device_name=device_name,
                nodes=nodes,
                gpus=gpus,
                address=address,
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
