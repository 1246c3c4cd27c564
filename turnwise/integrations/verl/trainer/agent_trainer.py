# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""AgentTrainer: verl's synchronous PPO trainer with our generation step and our credit assignment.

Of verl's step (sample, balance, old log-probs, reference, values, advantages, critic, actor) these
parts are replaced: what is generated (agent loops, or SyncMultiTurnRollout), which rows go on
(failures, group filters), advantages, and the pace of the updates (updates.py).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from ray.exceptions import RayActorError
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1 import PPOTrainer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.workers.utils.padding import response_from_nested

from turnwise.algos.credit import compute_advantages
from turnwise.algos.filters import filter_groups
from turnwise.algos.kl import MAX_LOG_RATIO, kl_rewards
from turnwise.algos.table import build_algorithm
from turnwise.envs.base import EnvFactory
from turnwise.integrations.verl.config.contract import check_contract
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.config.resolve import Where, resolve
from turnwise.integrations.verl.config.sections import SECTION, unpack, write_section
from turnwise.integrations.verl.config.settings import MODE
from turnwise.integrations.verl.engines import patches
from turnwise.integrations.verl.engines import plugin as plugin  # registers on import
from turnwise.integrations.verl.faults.cluster import (
    check_engine,
    give_workers,
    is_local,
    ray_options,
    start_ray,
    worker_environment,
)
from turnwise.integrations.verl.faults.nodes import settle_payload
from turnwise.integrations.verl.faults.watch import Watchdog, WorkerDiedError
from turnwise.integrations.verl.rollout import lockstep
from turnwise.integrations.verl.rollout.convert import batch_to_dataproto
from turnwise.integrations.verl.rollout.queue import (
    Rows,
    drop_groups,
    drop_places,
    queue_actors,
    read_rows,
    take_failures,
    write_tokens,
)
from turnwise.integrations.verl.trainer.custom import (
    EnvironmentRewardWrapper,
    Loading,
    judges_steps,
    replace_loaders,
)
from turnwise.integrations.verl.trainer.early import EarlySampling
from turnwise.integrations.verl.trainer.evaluation import take_result
from turnwise.integrations.verl.trainer.pace import check_paced
from turnwise.integrations.verl.trainer.pools import (
    _default_role_mapping,  # pyright: ignore[reportPrivateUsage]
    check_pool,
    check_roles,
)
from turnwise.integrations.verl.trainer.records import Recorder
from turnwise.integrations.verl.trainer.selection import (
    bare_rewards,
    broken_groups,
    groups_per_mini_batch,
    rewards_on_tokens,
    step_metrics,
)
from turnwise.integrations.verl.trainer.stalls import QueueWatch
from turnwise.integrations.verl.trainer.state import RunState
from turnwise.integrations.verl.trainer.updates import PacedTrainer
from turnwise.rollout.agents import Agent
from turnwise.rollout.proxy import RolloutError
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.train.update import Gap, TrainingError

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1
PATIENCE = 10.0
"""Seconds in which a dead worker is looked for, before a step without episodes is the environment's
fault."""
MAX_REFILLS = 3
"""A step replays its groups at most so many times before a failing environment is taken to be
broken."""
RewardFn = Callable[[DataProto], torch.Tensor]


class AgentTrainer(PacedTrainer):
    """Multi-turn PPO on verl.

    Args:
        config: verl's whole config with a section `turnwise`; or a Config, a ConfigStore or
            settings in any spelling that `load_config` takes, from which verl's config is made.
        tokenizer: used by every worker in place of the model's own. None: the model's.
        role_worker_mapping: Ray worker classes by verl's Role, in place of verl's own.
        resource_pool_manager: verl's ResourcePoolManager, in place of one pool over all devices.
        agent_cls: what stands between an environment and the model, in place of the one that
            `rollout.agent` names.
        processor: for multimodal models; must be None.
        reward_fn: takes a DataProto of sampled rows and returns their rewards, [B] or [B, response
            length]; these replace the environment's. Or an EnvironmentRewardWrapper.
        factories: environments by tag that no registered name stands for.
        train_dataset: in place of verl's data.custom_cls; see CustomEnvironmentDataset.
        val_dataset: the same for validation.
        collate_fn: in verl's loaders, in place of verl's.
        train_sampler: in verl's loader for training, in place of verl's.
        device_name: must be the run's own device (train.device).
        recorder: writes the run directory. None: nothing is written.
        nodes: as in `train`. A whole config of verl's says nodes and gpus itself.
        gpus: as in `train`.
        address: as in `train`. A Ray that this process has joined is used as it is.
    """

    _later: list[tuple[int, dict[str, float]]] | None = None
    """What was validated in a step, until the step's own row is written: rows are in the order of
    their steps, so that a resumed run can cut them at its checkpoint. None: no step is going on."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Mapping[Any, Any] | None = None,
        resource_pool_manager: Any = None,
        agent_cls: type[Agent] | None = None,
        processor: Any = None,
        reward_fn: RewardFn | None = None,
        *,
        factories: Mapping[str, EnvFactory] | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        recorder: Recorder | None = None,
        nodes: int = 1,
        gpus: int | None = None,
        address: str | None = None,
    ) -> None:
        check_contract()
        if processor is not None:
            raise ValueError("AgentTrainer reads text only: processor must be None")
        if reward_fn is not None and judges_steps(reward_fn):
            raise ValueError(
                "AgentTrainer's reward_fn takes (data); wrap one that takes (reward, observation, "
                "info): EnvironmentRewardWrapper(environment, reward_fn)"
            )
        verl_config, ours, recorder = resolve(
            config,
            tokenizer=tokenizer,
            agent_cls=agent_cls,
            factories=factories or {},
            recorder=recorder,
            where=Where(nodes=nodes, gpus=gpus, address=address, device=device_name),
        )
        with open_dict(verl_config):
            verl_config.trainer.v1.trainer_mode = (
                "sync"  # verl picks the on-policy replay buffer by this name
            )
        super().__init__(verl_config)
        self.ours = ours
        self.algorithm = build_algorithm(ours.algo)
        self.state = RunState(ours, self.algorithm)
        self.recorder = recorder
        self._lockstep: SyncMultiTurnRollout | None = None
        self._has_servers = False
        self._roles, self._pools = role_worker_mapping, resource_pool_manager
        self._reward_fn = reward_fn
        self._loading = Loading(
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=train_sampler,
        )
        self._address = address
        self._owns_queue = False
        self._watchdog: Watchdog | None = None
        self._failures: list[dict[str, Any]] = []
        self._refilled = 0
        self._idle = False
        self._rows: Rows | None = None
        """The step's rows between _balance_batch and _compute_advantage."""
        self._waits = QueueWatch(ours.rollout.stall_timeout)
        self._early = EarlySampling(self.replay_buffer, enough=ours.rollout.enough_groups)
        self.replay_buffer.poll_interval = POLL_SECONDS
        buffer: Any = self.replay_buffer
        self._wait_for_poll = buffer._wait_for_next_poll
        buffer._wait_for_next_poll = self._poll

    # ---- starting ----

    def init_workers(self) -> None:
        """Starts Ray and the TransferQueue where they are not running, then verl's workers and our
        rollout.

        Raises:
            ClusterError: the cluster lacks devices, or a node of it the run's environments or
                files.
        """
        # A worker imports that file first, and with verl's trainers this one.
        from turnwise.integrations.verl.rollout.spread import SpreadManager

        trainer = self.config.trainer
        check_engine(self.config.actor_rollout_ref.rollout.name, address=self._address)
        placement = Placement(
            nodes=trainer.nnodes, gpus=trainer.n_gpus_per_node, device=trainer.device
        )
        start_ray(placement, address=self._address, options=ray_options(self.ours.verl))
        environment = worker_environment(device=placement.device)
        payload = settle_payload(
            self.ours,
            unpack(self.config[SECTION].get("payload")),
            environment=environment,
            paths=self._local_paths(),
            local=is_local(),
        )
        write_section(self.config, self.ours, payload)
        with give_workers(environment):
            tq.init(self.config.transfer_queue)
            self._owns_queue = True
            self.init()
            self.agent_loop_manager = SpreadManager.create(
                config=self.config,
                llm_client=self.get_llm_client(),
                teacher_client=self.get_teacher_client(),
                reward_loop_worker_handles=self.get_reward_handles(),
            )
        self._has_servers = True

    @property
    def multi_turn_rollout(self) -> SyncMultiTurnRollout | None:
        """The lockstep rollout over the run's servers, None before `init_workers`. Its environments
        are made when it is first asked for."""
        if self._lockstep is None and self._has_servers:
            self._lockstep = lockstep.open_rollout(self)
        return self._lockstep

    def _local_paths(self) -> list[str]:
        """The run's folders that this machine has: every node must see them."""
        model = self.config.actor_rollout_ref.model
        given = (model.path, model.tokenizer_path, self.config.trainer.default_local_dir)
        return [str(path) for path in given if path is not None and Path(path).is_dir()]

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping.update(_default_role_mapping(self.config))
        if self._roles is not None:
            check_roles(self._roles, self.role_worker_mapping)
            train = self.ours.train
            asked = {
                "train.target_kl": train.target_kl is not None,
                "train.warmup_steps": train.warmup_steps > 0,
                "train.schedule": train.schedule != "constant",
                "algo.reduction": self.algorithm.reduction != "token_mean",
            }
            check_paced(self._roles, asked=[name for name, needed in asked.items() if needed])
            self.role_worker_mapping.update(self._roles)
        if self._pools is not None:
            check_pool(self._pools, self.mapping)
            self.resource_pool_manager = self._pools

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        replace_loaders(self, self._loading)
        if isinstance(self._reward_fn, EnvironmentRewardWrapper):
            self._reward_fn.bind(self.tokenizer, self.ours)

    # ---- the loop ----

    def fit(self, agent_loop_manager: Any = None) -> None:
        """Trains to the last step.

        Raises:
            WorkerDiedError: a process of the run is gone.
            TrainingError: training cannot go on.
            RolloutError: no episode can be played.
        """
        manager = agent_loop_manager or getattr(self, "agent_loop_manager", None)
        if manager is None:
            raise ValueError("fit needs workers: call init_workers() first")
        self._has_servers = True
        self._watchdog = Watchdog(self._actors(manager), where=lambda: f"step {self.global_steps}")
        self._watchdog.start()
        started = time.perf_counter()
        try:
            super().fit(manager)
            self._sum_up(seconds=time.perf_counter() - started)
        except KeyboardInterrupt:
            if not self._watchdog.interrupted:
                raise
            raise WorkerDiedError(self._watchdog.error) from None
        except RayActorError as error:
            found = (
                self._watchdog.look(patience=PATIENCE)
                or f"a worker died in step {self.global_steps}: {error}"
            )
            raise WorkerDiedError(found) from error
        finally:
            self._watchdog.stop()
            self._has_servers = False
            if self._lockstep is not None:
                self._lockstep.close()
                self._lockstep = None
            if self._owns_queue:
                tq.close()
                self._owns_queue = False

    def _sum_up(self, *, seconds: float) -> None:
        if self.recorder.history:  # else everything was done before
            self.recorder.finish(
                steps=self.global_steps - 1,
                evaluations=self.state.evaluations,
                seconds=seconds,
                piece=lambda token: self.tokenizer.decode([token]),
            )

    def _actors(self, manager: Any) -> dict[str, Any]:
        """All actors whose death would block the driver."""
        found = {
            f"training worker {rank}": worker
            for rank, worker in enumerate(self.actor_rollout_wg.workers)
        }
        found |= {
            f"rollout server {n}": server
            for n, server in enumerate(self.llm_server_manager.server_handles)
        }
        found |= {
            f"agent loop worker {n}": worker for n, worker in enumerate(manager.agent_loop_workers)
        }
        # In the training workers' processes, unless a user's pool says otherwise.
        if self.use_critic:
            found |= {
                f"critic worker {rank}": worker
                for rank, worker in enumerate(self.critic_wg.workers)
            }
        return found | queue_actors(self.config.transfer_queue)

    def _poll(self, partition_id: str, last_debug_time: float) -> float:
        if self._watchdog is not None:
            self._watchdog.check()
        training, rollout = partition_id == "train", self.config.actor_rollout_ref.rollout
        self._waits.look(
            self.replay_buffer,
            partition_id,
            members=rollout.n if training else rollout.val_kwargs.n,
            step=self.global_steps - training,  # as in the names of episodes
        )
        return self._wait_for_poll(partition_id, last_debug_time)

    def on_step_begin(self) -> None:
        self._refilled = 0
        self._failures = []
        self._idle = False
        self._waits.begin_step()

    def on_sample_end(self) -> None:
        """Gives up the episodes that the step does not wait for. Their replies are aborted, as
        verl's colocate_async does before its engines sleep."""
        late, manager, engines = self._early.late, self.agent_loop_manager, self.checkpoint_manager
        if late:
            cast(Any, manager).drop(late)
            drop_groups(late)
            cast(Any, engines).abort_replicas()
        super().on_sample_end()

    def on_step_end(self) -> None:
        super().on_step_end()
        if self._early.late:
            cast(Any, self.checkpoint_manager).resume_generation_replicas()

    # ---- generation ----

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        """Plays a step's episodes in lockstep; the rows to train on, as verl takes them.

        Args:
            gen_batch: the step's prompts, one row per group or per episode, or without rows: the
                environments make the prompts. `meta_info["step"]` counts from 0; without it, every
                call plays the next step.
        """
        rollout = self.multi_turn_rollout
        if rollout is None:
            raise ValueError("there is nothing to generate with: call init_workers() first")
        return lockstep.generate(self, rollout, gen_batch)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        groups: list[Any] = list(cast(Any, batch["index"]))
        self._waits.submitted(list(cast(Any, batch["uid"])), [int(index) for index in groups])
        if not lockstep.wanted(self.config):
            return super()._submit_batch_to_rollout(batch)
        return lockstep.submit(self, batch)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Refills groups of which no member could be played. A broken environment must not refill
        for ever."""
        self._failures += take_failures()
        self._refilled += num_prompts
        if self._refilled > MAX_REFILLS * self.config.data.train_batch_size:
            self._give_up(
                f"{self._refilled} groups failed whole, more than {MAX_REFILLS} times what a step "
                "has"
            )
        return super()._add_prompts_to_generate(num_prompts)

    def _give_up(self, what: str) -> NoReturn:
        """Raises for a step without episodes: a dead worker where there is one, else the first
        episode's error."""
        dead = (
            None
            if self._watchdog is None
            else self._watchdog.error or self._watchdog.look(patience=PATIENCE)
        )
        if dead is not None:
            raise WorkerDiedError(dead)
        why = "see the log of the agent loop workers"
        if self._failures:
            why = f"first error: {self._failures[0]['status']}: {self._failures[0]['error']}"
        raise RolloutError(f"step {self.global_steps}: {what}; {why}")

    # ---- which rows go on ----

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._failures += take_failures()
        rows = read_rows(batch)
        metrics |= step_metrics(rows.infos, self._failures, refilled=self._refilled)
        if self.ours.rollout.enough_groups is not None:
            size = self.ours.rollout.train.group_size
            metrics["rollout/late_episodes"] = float(size * len(self._early.late))
        broken = broken_groups(rows.members, self.ours.rollout)
        places = zip(rows.places, rows.infos, strict=True)
        batch = drop_places(batch, {place for place, info in places if info["group"] in broken})
        if not batch.keys:
            self._give_up("no group is whole enough to use")
        rows = rows.placed_in(batch)
        if self._reward_fn is not None:
            rows = self._apply_reward_fn(batch, rows)
            # What is trained is what is shown.
            metrics["rollout/env_reward"] = metrics["rollout/reward"]
            metrics["rollout/reward"] = float(rows.batch.rewards.sum()) / len(rows.members)
        elif self.algorithm.compares_groups:
            rewards, groups = bare_rewards(rows.batch, rows.infos)
            metrics["group/penalty_only"] = float(groups)
            if groups and self.algorithm.penalty_only_groups == "drop":
                write_tokens(batch, rows, {"rewards": rewards})
                rows = replace(rows, batch=rows.batch.replace(rewards=rewards))
        kept, found = filter_groups(rows.batch, self.algorithm)
        metrics |= found
        normal = self.state.normalizer(rows.batch, [info["tag"] for info in rows.infos])
        if normal is not rows.batch:
            write_tokens(batch, rows, {"rewards": normal.rewards})
        self._rows = replace(rows, batch=normal)
        if kept.numel():
            # Rows of roles that are not trained stay with their episode.
            episodes = [key.rpartition("_")[0] for key in rows.keys]
            chosen = {episodes[row] for row in kept.tolist()}
            places = zip(rows.places, episodes, strict=True)
            batch = drop_places(batch, {place for place, one in places if one not in chosen})
        else:
            # No group differs in reward. verl's step needs rows, so they are kept with advantage 0.
            self._idle = True
        self._size_mini_batches(len(batch.keys))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _size_mini_batches(self, rows: int) -> None:
        """Sizes verl's mini-batches by the rows that there are, so that train.mini_batches of them
        make a pass.

        verl counts a mini-batch in prompts of rollout.n rows, fixed before the run; but filters and
        failures leave fewer rows in a step, and windows make more.
        """
        trainer, actor = self.config.trainer, self.config.actor_rollout_ref
        size = groups_per_mini_batch(
            rows,
            group_size=actor.rollout.n,
            mini_batches=self.ours.train.mini_batches,
            ranks=trainer.nnodes * trainer.n_gpus_per_node,
        )
        actor.actor.ppo_mini_batch_size = size
        self.config.critic.ppo_mini_batch_size = size

    def _apply_reward_fn(self, batch: Any, rows: Rows) -> Rows:
        """The rows with the rewards of the user's function in place of the environment's."""
        assert self._reward_fn is not None
        data = batch_to_dataproto(rows.batch, pad_id=self.tokenizer.pad_token_id)
        names = ["index", "split"]
        extra = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=names
        )
        for name in names:
            values = list(extra[name])
            data.non_tensor_batch[name] = _objects([values[place] for place in rows.places])
        rewards = torch.as_tensor(self._reward_fn(data), dtype=torch.float32)
        judged = rows.batch.replace(rewards=rewards_on_tokens(rows.batch, rewards))
        write_tokens(batch, rows, {"rewards": judged.rewards})
        return replace(rows, batch=judged)

    # ---- credit ----

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """The critic's values of the responses, and of the state after each row, for truncated
        ones."""
        batch.extra_info.update(
            {
                "compute_loss": False,
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )
        ray.get(self.critic_wg.infer_batch(batch).futures)
        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["values", "response_mask"],
        )
        whole = data["values"]
        last = torch.stack([row[-1] for row in whole.unbind(0)]).float()
        fields = {"values": response_from_nested(whole, data["response_mask"]), "bootstrap": last}
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(fields, batch_size=[len(batch)]),
        )
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Credit by our estimators, with the critic's values where there is one."""
        assert self._rows is not None  # of _balance_batch: the queue is read only for what is new
        fields = ["old_log_probs", "entropy", "ref_log_prob", "values", "bootstrap"]
        rows, self._rows = self._rows.placed_in(batch).with_fields(batch, fields), None
        ours = rows.batch
        self._check_rows(rows)
        penalty = None
        if self.algorithm.kl_in == "reward" and ours.ref_logprobs is not None:
            penalty, kl = kl_rewards(ours, coef=self.state.kl.coef, form=self.algorithm.kl_form)
            metrics["train/kl_ref"] = kl
        ours, found = compute_advantages(ours, self.algorithm, token_rewards=penalty)
        assert ours.advantages is not None
        assert ours.returns is not None
        metrics |= {f"train/{name}": value for name, value in found.items()} | self._gap(ours)
        self._idle = self._idle or not bool(ours.advantages[ours.loss_mask].any())
        metrics["train/idle"] = float(self._idle)
        metrics["train/values_seen"] = float(ours.values is not None and bool(ours.values.any()))
        self._note_idle(metrics)
        advantages = torch.zeros_like(ours.advantages) if self._idle else ours.advantages
        tensors = {"advantages": advantages, "returns": ours.returns}
        self.recorder.step(self.global_steps - 1, rows, ours)
        self._later = []
        if self.algorithm.tis_cap is not None:
            assert ours.old_logprobs is not None
            ratio = (ours.old_logprobs - ours.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            weights = torch.where(ours.response_mask, ratio.clamp(max=self.algorithm.tis_cap), 1.0)
            write_tokens(
                batch,
                rows,
                {"weights": weights},
                names={"weights": "rollout_is_weights"},
                padding=1.0,
            )
        return write_tokens(batch, rows, tensors)

    def _check_rows(self, rows: Rows) -> None:
        if len(rows.members) == len(rows.infos) or self.algorithm.reduction in (
            "token_mean",
            "sequence_mean",
        ):
            return
        raise TrainingError(
            f"step {self.global_steps}: {len(rows.members)} episodes became {len(rows.infos)} rows "
            "(the chat template "
            f"rewrites history), and verl cannot reduce by {self.algorithm.reduction}; set "
            "algo.reduction: token_mean"
        )

    def _gap(self, ours: Any) -> dict[str, float]:
        """Difference between the trainer's and the engine's log-probs. Raises if it exceeds
        train.max_gap."""
        if ours.old_logprobs is None:
            return {}
        gap = Gap.of((ours.old_logprobs - ours.logprobs)[ours.loss_mask].abs())
        gap.check(self.ours.train.max_gap, step=self.global_steps)
        return {"train/gap_mean": gap.mean, "train/gap_max": gap.max}

    def _note_idle(self, metrics: dict[str, Any]) -> None:
        last = self.global_steps >= self.total_training_steps
        self.state.still.count(self.global_steps, metrics, updated=not self._idle, last=last)
        if self.state.still.why is not None:
            raise TrainingError(self.state.still.why)

    # ---- validation and records ----

    def _validate(self) -> dict[str, float]:
        """Plays the held-out tasks through the same agent loops, turn by turn."""
        try:
            metrics = super()._validate()
        except Exception as error:
            failures = take_failures()
            if not failures:
                raise
            first = f"{failures[0]['status']}: {failures[0]['error']}"
            raise RolloutError(
                f"validation failed ({len(failures)} episodes); first error: {first}"
            ) from error
        result = take_result(failures=len(take_failures()))
        if result is not None:
            metrics |= result.metrics()
            metrics["eval/turns"] = sum(outcome.turns for outcome in result.outcomes) / len(
                result.outcomes
            )
            step = min(self.global_steps, self.total_training_steps)
            label = "after" if step == self.total_training_steps else "during" if step else "before"
            self.state.evaluations.append(result.event(step, label))
        if self._later is None:
            self.recorder.metrics(self.global_steps, metrics)
        else:
            self._later.append((self.global_steps, metrics))
        return metrics

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        # verl adds what a validation found to its step; here it has a row of its own.
        own = {
            name: value for name, value in metrics.items() if not name.startswith(("eval/", "val-"))
        }
        self.recorder.metrics(self.global_steps - 1, own)
        later, self._later = self._later or [], None
        for step, found in later:
            self.recorder.metrics(step, found)


register_trainer(MODE)(AgentTrainer)  # as a decorator it would hide the class's type
patches.refuse_other_trainers(PPOTrainer, AgentTrainer)


def _objects(values: list[Any]) -> Any:
    import numpy as np

    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
