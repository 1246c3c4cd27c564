# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""MultiTurnMixin: multi-turn environments in TRL's GRPOTrainer, through methods that are stable
across releases.

It uses the constructor's `rollout_func` and overrides `_generate_and_score_completions(inputs)`,
`_calculate_rewards(..)`, `_get_train_sampler(..)` and `compute_loss(..)`. Everything else in TRL is
unchanged. `releases.py` checks what is relied on.
"""

import logging
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DistributedType
from accelerate.utils import gather_object

from turnwise.algos.algorithm import Algorithm
from turnwise.integrations.trl import contexts, detect, seats
from turnwise.integrations.trl.config import VerifiersGRPOConfig, resolved
from turnwise.integrations.trl.credit import (
    TrainRow,
    completion_messages,
    earlier_rows,
    group_advantages,
    token_advantages,
    train_row,
    trained_reward,
)
from turnwise.integrations.trl.engines import Gate, TRLGenerator, base_model, copy_weights
from turnwise.integrations.trl.lookahead import LookaheadSampler
from turnwise.integrations.trl.player import BatchPlayer, Rows
from turnwise.integrations.trl.rewards import as_texts, refuse_infinite
from turnwise.integrations.trl.setup import choose_engine, make_player
from turnwise.integrations.trl.sources import ROW, SPLIT, EnvSource
from turnwise.integrations.trl.store import RunStore, credit_rows, trained_and_sampled
from turnwise.log.metrics import context_causes, rollout_metrics
from turnwise.log.store import ledger_entry
from turnwise.rollout.proxy import RolloutError
from turnwise.types import Episode

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)
REWARD = "turnwise_reward"


class MultiTurnMixin(_Trainer):
    """Put before GRPOTrainer among the base classes; call `init_multi_turn` before GRPOTrainer's
    constructor.

    If `multi_turn` is False, every hook calls TRL's own method.
    """

    args: VerifiersGRPOConfig
    model: Any
    num_generations: int
    source: EnvSource
    has_env: bool = False
    multi_turn: bool = False
    async_generation: bool = False
    _player: BatchPlayer | None = None
    _store: RunStore | None = None
    advantage_scale: float = 1.0
    """Multiplies advantages per token; for losses whose constant differs from turnwise's."""

    def is_multi_turn_environment(self, env: object) -> bool:
        """True if turnwise plays the episodes, False if TRL's single-turn path does."""
        return detect.is_multi_turn_environment(env)

    def init_multi_turn(
        self,
        source: EnvSource,
        args: VerifiersGRPOConfig,
        *,
        multi_turn: bool,
        algorithm: Algorithm | None = None,
        config: Any = None,
        store: RunStore | None = None,
    ) -> None:
        """Stores the settings. The engine is created at the first generation, when model and
        devices are known."""
        self.has_env = True
        self.multi_turn = multi_turn
        self.source = source
        self.async_generation = (
            multi_turn and args.enable_async_generation and args.num_batches_ahead > 0
        )
        self._algorithm = algorithm
        self._store = store
        self._engine = ""
        self._sampler: LookaheadSampler | None = None
        self._ahead: dict[tuple[int, int], Future[list[Episode]]] = {}
        self._asked: Rows | None = None
        self._rows: list[TrainRow] = []
        self._all_rows: list[TrainRow] = []  # those of earlier contexts after the others
        self._row_weights: torch.Tensor | None = None
        self._reward_columns: torch.Tensor | None = None
        self._moment = (-1, 0)
        self._warned: set[str] = set()
        self._snapshot: Any = None  # copy of the weights for sampling during training

    # The hooks, in the order in which TRL calls them.

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not self.async_generation:
            return sampler
        self._sampler = LookaheadSampler(
            sampler,
            batch_size=resolved(self.args.generation_batch_size),
            repeats=self.num_iterations * resolved(self.args.steps_per_generation),
        )
        return self._sampler

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.has_env:
            inputs = self.source.remember(inputs)
        if not self.multi_turn:
            return super()._generate_and_score_completions(inputs)
        split = inputs[0][SPLIT]
        numbers = tuple(row[ROW] for row in inputs)
        self._asked = Rows(
            numbers=numbers,
            split=split,
            first=self.accelerator.process_index * len(numbers),
            group_size=self._group_size(),
            moment=self._next_moment(),
        )
        rows = [{**self.source.columns(split, row[ROW]), **row} for row in inputs]
        output = super()._generate_and_score_completions(rows)
        self._leave_out_failures(output)
        self._correct_for_age(output)
        everyone = self._everyone([row.episode for row in self._rows])
        output = self._add_contexts(output)
        metrics = self._assign_credit(output, everyone)
        self._keep(output, everyone, metrics)
        return output

    def play_rows(self, prompts: Sequence[Any], trainer: Any = None) -> dict[str, Any]:
        """The result of `rollout_func`: ids, masks and log-probs of the batch that TRL is
        generating."""
        assert self._asked is not None
        if self._player is None:
            self._engine = choose_engine(self)
            self.async_generation = self._may_run_ahead()
            self._player = make_player(self, engine=self._engine, ahead=self.async_generation)
        episodes = self._play(self._asked)
        self._check_failures(episodes)
        eos_id = self._eos_id()
        self._rows = [train_row(episode, eos_id=eos_id) for episode in episodes]
        generator = self._player.proxy.generator._generator
        exact = not isinstance(generator, TRLGenerator) or generator.exact_logprobs
        kept = self.source.instances
        objects = [kept.pop(episode.noise_seed, None) for episode in episodes] if kept else None
        return {
            **({} if objects is None else {"environments": objects}),
            "prompt_ids": [row.prompt_ids for row in self._rows],
            "completion_ids": [row.completion_ids for row in self._rows],
            "logprobs": [row.logprobs for row in self._rows] if exact else None,
            "env_mask": [row.mask for row in self._rows],
            REWARD: [trained_reward(row.episode) for row in self._rows],
        }

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        if self.multi_turn:
            # In place: reward functions, TRL's table of completions and its parquet files then see
            # the conversation.
            completions[:] = [completion_messages(row.episode) for row in self._rows]
            prompts[:] = [
                [message.to_json() for message in row.episode.prompt] or prompt
                for row, prompt in zip(self._rows, prompts, strict=True)
            ]
        if self.has_env and inputs[0][SPLIT] in self.source.text_splits:
            prompts, completions = as_texts(prompts, completions)
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        refuse_infinite(rewards, self.reward_func_names)
        if self.has_env and not rewards.nan_to_num().any():
            self._warn(
                "zero_rewards",
                f"all {len(rewards)} rewards of this batch are 0, so nothing is learned from it. "
                "Where this goes on, check the environment's reward and the reward functions: "
                "completions are lists of messages, or text where train_dataset's prompts are text",
            )
        if not self.multi_turn:
            return rewards
        failed = [row.failed for row in self._rows]
        everyone = torch.tensor(self._everyone(failed), device=rewards.device)
        # A failed episode has no reward, whatever the reward functions return.
        rewards[everyone] = torch.nan
        self._reward_columns = rewards
        return rewards

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss. A batch that contexts have made larger than `per_device_train_batch_size` is
        scored in parts of that size, each with its own backward pass."""
        size = self.args.per_device_train_batch_size
        whole = (
            not self.multi_turn
            or not self.model.training
            or inputs["completion_ids"].shape[0] <= size
            # DeepSpeed takes an optimizer step with the backward pass.
            or self.accelerator.distributed_type == DistributedType.DEEPSPEED
        )
        if whole:
            return super().compute_loss(model, inputs, *args, **kwargs)
        *first, last = [
            (part, contexts.part_weight(part, inputs, loss_type=self.loss_type))
            for part in contexts.parts(inputs, size)
        ]
        sum_ = torch.zeros((), device=self.accelerator.device)
        for part, weight in first:
            loss = weight * super().compute_loss(model, part, *args, **kwargs)
            self.accelerator.backward(loss)
            sum_ += loss.detach()
        part, weight = last
        return weight * super().compute_loss(model, part, *args, **kwargs) + sum_

    # Playing.

    def _play(self, rows: Rows) -> list[Episode]:
        assert self._player is not None
        started = time.perf_counter()
        place = None
        if self.async_generation and rows.split == "train" and self._sampler is not None:
            place = self._sampler.locate(rows.numbers)
        waiting = self._ahead.pop(place, None) if place is not None else None
        if waiting is None:
            self._update_weights()
            waiting = self._player.play(rows)
        # Submitted before waiting: there is no update in between, so the weights are the same.
        if place is not None:
            self._play_ahead(place, len(rows.numbers))
        episodes = waiting.result()
        self._metric("rollout/wait_seconds", time.perf_counter() - started)
        if (
            self._engine == "local"
            and not self.async_generation
            and self.accelerator.device.type == "cuda"
        ):
            self._player.proxy.generator._generator.free_cache()
        return episodes

    def _play_ahead(self, place: tuple[int, int], count: int) -> None:
        """Starts the next batches with the current weights."""
        assert self._sampler is not None
        assert self._player is not None
        todo: list[tuple[int, int]] = []
        following = self._sampler.after(place)
        for _ in range(min(self.args.num_batches_ahead, self._generations_left())):
            if following is None:
                break
            if following not in self._ahead:
                todo.append(following)
            following = self._sampler.after(following) if self._sampler.rows(following) else None
        if not todo:
            return
        self._update_weights()
        first = self.accelerator.process_index * count
        for where in todo:
            numbers = self._sampler.rows(where)[first : first + count]
            rows = Rows(
                numbers=tuple(numbers),
                split="train",
                first=first,
                group_size=self.num_generations,
                moment=(self.state.global_step, *where),
            )
            self._ahead[where] = self._player.play(rows)

    def _generations_left(self) -> int:
        """How many more generations the run can use after this one."""
        every = resolved(self.args.steps_per_generation) * self.num_iterations
        micro_steps = (
            self.state.max_steps - self.state.global_step
        ) * self.args.gradient_accumulation_steps
        return max(-(-micro_steps // every) - 1, 0)

    def _update_weights(self) -> None:
        assert self._player is not None
        generator = self._player.proxy.generator._generator
        version = self.state.global_step
        if isinstance(generator, TRLGenerator) or generator.policy_version == version:
            return
        if not isinstance(generator, Gate):
            generator.weights_updated(version)
            return
        source, target = base_model(self), self._snapshot
        self._player.run(generator.update(lambda: copy_weights(source, target), version))

    def _may_run_ahead(self) -> bool:
        if not self.async_generation:
            return False
        if self._engine == "trl":
            self._warn(
                "async",
                "async generation is off: TRL's engine (vLLM, a sharded model, continuous "
                "batching) cannot sample "
                "beside training. The run is synchronous; set engine='local' where the model fits "
                "into one process",
            )
            return False
        return True

    def _next_moment(self) -> tuple[int, ...]:
        step, count = self._moment
        self._moment = (
            (step, count + 1) if step == self.state.global_step else (self.state.global_step, 0)
        )
        return self._moment

    def _check_failures(self, episodes: Sequence[Episode]) -> None:
        """Stops the run on all processes if no episode of the batch can be used."""
        errors = [
            f"{e.status.value}: {e.error}" for e in episodes if e.status.failed or not e.turns
        ]
        everyone = self._everyone(errors)
        total = len(episodes) * self.accelerator.num_processes
        if len(everyone) == total:
            raise RolloutError(
                f"none of the {total} episodes of this batch can be used; first error: "
                f"{everyone[0]}"
            )
        if everyone and self.accelerator.is_main_process:
            logger.warning(
                "%d of %d episodes failed and are left out: %s", len(everyone), total, everyone[0]
            )

    # After TRL has scored the batch.

    def _leave_out_failures(self, output: Any) -> None:
        """Excludes episodes without a reward from the baseline. Older releases of TRL treat them as
        a reward of 0."""
        assert self._reward_columns is not None
        missing = self._reward_columns.isnan().all(1)
        if not missing.any() or self.multi_objective_aggregation != "sum_then_normalize":
            return
        weights = self.reward_weights.to(self._reward_columns.device)
        rewards = (self._reward_columns * weights).nansum(1).masked_fill(missing, torch.nan)
        advantages = group_advantages(
            rewards, group_size=self._group_size(), scale=self.scale_rewards
        )
        first = self.accelerator.process_index * len(self._rows)
        output["advantages"] = advantages[first : first + len(self._rows)]

    def _correct_for_age(self, output: Any) -> None:
        """If the sampler was older than the policy, computes the loss ratio against the sampler.

        TRL reads log-probs of a rollout function only with vLLM; there it corrects by itself.
        """
        step = self.state.global_step
        ages = [
            step - turn.completion.policy_version
            for row in self._rows
            for turn in row.episode.turns
        ]
        self._metric("rollout/staleness", sum(ages) / max(len(ages), 1))
        self._metric("rollout/staleness_max", float(max(ages, default=0)))
        stale = any(self._everyone([any(ages)]))
        if not stale or "importance_sampling_ratio" in output:
            return
        output["old_per_token_logps"] = output["sampling_per_token_logps"]

    def _add_contexts(self, output: Any) -> Any:
        """Adds rows for the episodes' earlier contexts, and weighs all rows so that an episode
        counts as one."""
        self._all_rows = list(self._rows)
        if (
            not any(self._everyone([row.left_out > 0 for row in self._rows]))
            or not self.model.training
        ):
            return output
        if not contexts.can_extend(output):
            self._warn_left_out()
            return output
        extra = [row for main in self._rows for row in earlier_rows(main.episode)]
        pad_id = self._text_tokenizer().pad_token_id
        # As many on every process: each part of a batch is a pass that all of them make.
        largest = max(self._everyone([len(self._rows) + len(extra)]))
        total = largest + -largest % resolved(self.args.steps_per_generation)
        output = contexts.extend(output, extra, pad_id=pad_id, total=total)
        self._all_rows.extend(extra)
        by_sequence = self._algorithm is not None and self._algorithm.reduction == "sequence_mean"
        weights = contexts.row_weights(
            self._all_rows, total=total, loss_type=self.loss_type, by_sequence=by_sequence
        )
        device = output["completion_ids"].device
        self._row_weights = torch.tensor([*weights, *[0.0] * (total - len(weights))], device=device)
        trained = (output["completion_mask"] * output["tool_mask"]).sum()
        counts: Any = self.accelerator.gather(trained)
        output["num_items_in_batch"] = counts.sum()
        by_episode = {row.episode.id: index for index, row in enumerate(self._rows)}
        first = [by_episode[row.episode.id] for row in self._all_rows]
        spread = torch.zeros(total, device=device)
        spread[: len(first)] = output["advantages"][first]
        output["advantages"] = spread * self._row_weights
        return output

    def _assign_credit(self, output: Any, everyone: Sequence[Episode]) -> dict[str, float]:
        """Puts advantages per token in place of TRL's, where the run asks for them, or per agent,
        where episodes have several."""
        if seats.has_seats(everyone) and self.model.training:
            self._credit_seats(output, everyone)
            return {}
        if self.args.credit == "group_relative":
            return {}
        assert self._reward_columns is not None
        weights = self.reward_weights.to(self._reward_columns.device)
        extra = (self._reward_columns[:, 1:] * weights[1:]).nansum(1).tolist()
        found, metrics = token_advantages(
            everyone,
            credit=self.args.credit,
            algorithm=self._algorithm,
            turn_discount=self.args.turn_discount,
            scale=self.scale_rewards not in ("none", False),
            env_weight=float(weights[0]),
            extra=extra,
        )
        advantages = torch.zeros_like(output["completion_ids"], dtype=torch.float32)
        for index, row in enumerate(self._all_rows):
            if not row.failed:
                size = len(row.completion_ids)
                tokens = found[row.episode.id][row.context][row.start : row.start + size]
                advantages[index, :size] = self.advantage_scale * tokens.to(advantages.device)
        if len(self._all_rows) > len(self._rows) or advantages.shape[0] > len(self._rows):
            assert self._row_weights is not None
            advantages *= self._row_weights[:, None]
        output["advantages"] = advantages
        return metrics

    def _credit_seats(self, output: Any, everyone: Sequence[Episode]) -> None:
        """Credits each agent of an episode with its own reward."""
        assert self._reward_columns is not None
        name = self.source.name
        if self.args.credit != "group_relative" or self._reward_columns.shape[1] > 1:
            raise ValueError(
                f"the episodes of {name} have several agents with a reward each; credit "
                f"{self.args.credit!r} and reward_funcs are about the episode as a whole. Leave "
                "them out"
            )
        if not contexts.can_extend(output):
            raise ValueError(
                f"the episodes of {name} have several agents, and so several rows; with beta or "
                "vLLM's correction TRL scores one row per episode. Set beta=0"
            )
        scale = str(self.scale_rewards)  # False in older releases, which is none
        found = seats.seat_advantages(self._all_rows, everyone, scale=scale)
        advantages = torch.zeros_like(output["advantages"])
        advantages[: len(found)] = torch.tensor(found, device=advantages.device)
        if len(advantages) > len(self._rows):
            assert self._row_weights is not None
            advantages *= self._row_weights
        output["advantages"] = advantages

    def _keep(self, output: Any, everyone: Sequence[Episode], metrics: dict[str, float]) -> None:
        """Checks that trained ids are sampled ids; then metrics and the run directory."""
        step = self.state.global_step + 1
        pairs = self._everyone(trained_and_sampled(output, self._all_rows))
        ledger = ledger_entry(step, pairs, contexts=context_causes(everyone))
        if ledger.broken:
            raise RuntimeError(
                f"step {step}: token fidelity is broken in {ledger.broken} of {len(pairs)} rows. "
                "Nothing was trained "
                "on them; please report this bug"
            )
        metrics = {**rollout_metrics(everyone), **metrics}
        for name, value in metrics.items():
            self._metric(name, value)
        left_out = self._everyone(
            [row.left_out for row in self._rows] if len(self._all_rows) == len(self._rows) else []
        )
        self._metric("rollout/untrained_tokens", float(sum(left_out)))
        if self._store is not None and self.args.store_episodes:
            credit = self._everyone(credit_rows(output, self._all_rows))
            assert self._asked is not None
            self._store.write(step, everyone, credit=credit, ledger=ledger, split=self._asked.split)

    # Small things.

    def _group_size(self) -> int:
        if self.model.training:
            return self.num_generations
        return self.__dict__.get("num_generations_eval") or self.num_generations

    def _eos_id(self) -> int:
        tokenizer = self._text_tokenizer()
        return (
            tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.pad_token_id
        )

    def _text_tokenizer(self) -> Any:
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def _everyone(self, mine: list[Any]) -> list[Any]:
        """The lists of all processes, one after the other."""
        return list(mine) if self.accelerator.num_processes == 1 else gather_object(list(mine))

    def _metric(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _warn_left_out(self) -> None:
        left_out = sum(row.left_out for row in self._rows)
        if left_out:
            self._warn(
                "left_out",
                f"the chat template rewrote earlier turns, or the environment did; {left_out} "
                "tokens of this batch stand in contexts of their own. With beta or vLLM's "
                "correction TRL scores one row per episode, so only the last context of each is "
                "trained on. Give the tokenizer a template that only appends "
                "(trl.chat_template_utils has one for Qwen3), or set beta=0",
            )

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            if self._store is not None:
                self._store.event(key, message, self.state.global_step)
            warnings.warn(message, stacklevel=3)
