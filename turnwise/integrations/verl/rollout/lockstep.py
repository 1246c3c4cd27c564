# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""SyncMultiTurnRollout as verl's generation step: all episodes of a step turn by turn, for engines
that batch."""

from typing import TYPE_CHECKING, Any, cast

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from turnwise.generate.stops import end_ids
from turnwise.integrations.verl.config.sections import SECTION, unpack
from turnwise.integrations.verl.rollout.agent_loop import (
    FAILURES,
    SAMPLED,
    episode_outputs,
    failure_tag,
)
from turnwise.integrations.verl.rollout.convert import batch_to_dataproto
from turnwise.integrations.verl.rollout.generator import ServerEngine, ServerGenerator
from turnwise.rollout.proxy import RolloutError
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.types import Episode

if TYPE_CHECKING:
    from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer


def wanted(config: Any) -> bool:
    """True where the section `turnwise` says `lockstep: true`."""
    return bool((config.get(SECTION) or {}).get("lockstep", False))


def open_rollout(trainer: "AgentTrainer") -> SyncMultiTurnRollout:
    """A lockstep rollout over the trainer's LLM servers."""
    rollout = trainer.config.actor_rollout_ref.rollout
    generator = ServerGenerator(
        trainer.get_llm_client(),
        engine=rollout.name,
        max_context=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        stop_ids=end_ids(trainer.tokenizer, None),
        tokenizer=trainer.tokenizer,
    )
    payload = unpack(trainer.config[SECTION].get("payload"))
    return SyncMultiTurnRollout(
        actor_rollout_wg=ServerEngine(generator),
        cfg=trainer.ours,
        tokenizer=trainer.tokenizer,
        processor=None,
        agent_cls=payload.agent_cls,
        factories=payload.factories or None,
    )


def generate(
    trainer: "AgentTrainer", rollout: SyncMultiTurnRollout, gen_batch: DataProto
) -> DataProto:
    """The rows of one lockstep rollout. Failed episodes are left out and their groups repaired.

    Raises:
        ValueError: the batch has neither a row per group nor a row per episode.
        RolloutError: no group can be trained on.
    """
    groups = trainer.ours.rollout.train
    sizes = (0, groups.env_groups, groups.env_groups * groups.group_size)
    if len(gen_batch) not in sizes:
        raise ValueError(
            f"gen_batch has {len(gen_batch)} rows; a step has {sizes[1]} groups "
            f"(rollout.train.env_groups) and {sizes[2]} episodes"
        )
    gen_batch.meta_info.update(
        {
            "eos_token_id": trainer.tokenizer.eos_token_id,
            "pad_token_id": trainer.tokenizer.pad_token_id,
            "do_sample": True,
        }
    )
    if "step" in gen_batch.meta_info:
        rollout.env_state.num_resets = int(gen_batch.meta_info["step"])
    if isinstance(rollout.engine, ServerEngine):
        rollout.engine.reset()  # a step that is played again asks with other ids
    step, every = rollout.env_state.num_resets, trainer.ours.log.episodes_every
    rollout.reset()
    rollout.rollout()
    usable = rollout.episodes()
    if not usable:
        raise RolloutError(f"step {step + 1}: no group is whole enough to use{_why(rollout)}")
    batch = rollout.build_update_batch(pad_id=trainer.tokenizer.pad_token_id)
    data = batch_to_dataproto(batch, pad_id=trainer.tokenizer.pad_token_id)
    store = every > 0 and step % every == 0
    fields = [
        out.as_dict()
        for episode in usable
        for out in episode_outputs(episode, validate=False, store=store)
    ]
    for name in ("extra_fields", "num_turns", "metrics"):
        data.non_tensor_batch[name] = _objects([field[name] for field in fields])
    # Numbers that mean the same in every rollout, unlike a batch's own.
    for name in (
        "turn_ids",
        "state_ids",
    ):
        rows = torch.nn.utils.rnn.pad_sequence([field[name] for field in fields], True, -1)
        data.batch[name][:, : rows.shape[1]] = rows
    return data


def _failed(rollout: SyncMultiTurnRollout) -> list[Episode]:
    return [one for one in rollout.env_state.episodes() if one.status.failed or not one.turns]


def _why(rollout: SyncMultiTurnRollout) -> str:
    first = next((f"{one.status.value}: {one.error}" for one in _failed(rollout)), None)
    return "" if first is None else f"; first error: {first}"


def submit(trainer: "AgentTrainer", batch: TensorDict) -> int:
    """Plays the groups of verl's batch and puts their rows into the queue, as agent loops would."""
    uids: list[str] = list(cast(Any, batch["uid"]))
    gen_batch = DataProto(meta_info={"step": trainer.global_steps - 1})
    data = trainer._generate_multi_turn_sequences(gen_batch)  # pyright: ignore[reportPrivateUsage]
    assert trainer.multi_turn_rollout is not None
    for episode in _failed(trainer.multi_turn_rollout):
        key = f"{uids[episode.group_id]}_{episode.index}"
        tq.kv_put(key=key, partition_id=FAILURES, tag=failure_tag(episode, split="train"))
    rows, keys, tags = [], [], []
    for number in range(len(data)):
        item = data[number]
        info = item.non_tensor_batch["extra_fields"]["turnwise"]
        uid = uids[info["group"]]
        fields = _row(item, data.batch["prompts"].shape[1])
        fields |= {name: _value(column, info["group"]) for name, column in batch.items()}
        fields |= {"session_id": info["member"], "multi_modal_inputs": {}}
        keys.append(f"{uid}_{info['member']}_{info['row']}")
        rows.append(fields)
        tags.append(_tag(fields, item.non_tensor_batch["extra_fields"], trainer.global_steps))
    tq.kv_batch_put(
        keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags
    )
    done = [
        {"is_prompt": True, "status": "finished", "global_steps": trainer.global_steps}
        for _ in uids
    ]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=done)
    return len(uids)


def _row(item: Any, left: int) -> dict[str, Any]:
    """One row without its padding."""
    real = item.batch["attention_mask"].bool()
    prompt, response = real[:left], real[left:]
    fields: dict[str, Any] = {
        "prompts": item.batch["prompts"][prompt],
        "responses": item.batch["responses"][response],
        "input_ids": item.batch["input_ids"][real],
        "position_ids": item.batch["position_ids"][real],
    }
    for name in ("loss_mask", "rm_scores", "rollout_log_probs", "turn_ids", "state_ids"):
        fields[name] = item.batch[name][response]
    fields["response_mask"] = fields["loss_mask"]  # verl trains on what this one names
    fields[SAMPLED] = item.batch["response_mask"][response]
    return fields | {
        name: item.non_tensor_batch[name] for name in ("extra_fields", "num_turns", "metrics")
    }


def _tag(fields: dict[str, Any], extra: dict[str, Any], step: int) -> dict[str, Any]:
    prompt, response = len(fields["prompts"]), len(fields["responses"])
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        "min_global_steps": extra["min_global_steps"],
        "max_global_steps": extra["max_global_steps"],
    }


def _value(column: Any, index: int) -> Any:
    if isinstance(column, NonTensorStack):
        return column[index].data
    return column.data if isinstance(column, NonTensorData) else column[index]


def _objects(values: list[Any]) -> Any:
    import numpy as np

    found = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        found[index] = value
    return found
