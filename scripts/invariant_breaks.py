"""The table of deliberate mistakes that break_invariants.py makes, by invariant."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """One deliberate mistake, and the tests that must notice it."""

    name: str
    invariant: int
    """The number of the rule in docs/invariants.md."""
    what: str
    """What is broken, in one sentence."""
    file: str
    """The file that changes, relative to the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files or pytest node ids. Only quick ones: they run twice."""

    def stale(self, root: Path) -> str | None:
        """Why the break does not fit the code under `root`, or None where it does."""
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}; name the file that the code moved to"
        count = path.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"its text occurs {count} times in {self.file} and must occur once; adapt it"
        return None


CONFORMANCE = ("tests/conformance/test_ours.py",)
DATA = ("tests/unit/test_data.py",)
GROUPS = ("tests/numerics/test_groups.py",)
HF = "tests/unit/test_generate_hf.py"
LOSSES = ("tests/numerics/test_losses.py",)
PACKING = "tests/unit/test_train_packing.py"
ROLLOUT = "tests/unit/test_rollout.py"
SCORING = "tests/unit/test_train_scoring.py"
TRAINER = "tests/unit/test_train_trainer.py"
UPDATE = "tests/unit/test_train_update.py"
COMPANY = (f"{HF}::test_a_session_has_the_same_bits_in_any_company",)
RESUMED = (f"{TRAINER}::test_a_resumed_run_ends_like_one_never_stopped",)

BREAKS: tuple[Break, ...] = (
    # 1. Trained ids are sampled ids.
    Break(
        name="end-token-cut",
        invariant=1,
        what="The generator leaves the stop token out of a completion.",
        file="turnwise/generate/requests.py",
        old=(
            "            ids=tuple(state.ids[request.start :]),\n"
            "            logprobs=tuple(state.logprobs),\n"
            '            finish_reason="stop" if stopped else "length",\n'
        ),
        new=(
            "            ids=tuple(state.ids[request.start : len(state.ids) - stopped]),\n"
            "            logprobs=tuple(state.logprobs[: len(state.logprobs) - stopped]),\n"
            '            finish_reason="stop" if stopped else "length",\n'
        ),
        tests=(f"{HF}::test_stop_ids_and_stop_strings_end_a_completion_and_are_kept",),
    ),
    Break(
        name="end-token-untrained",
        invariant=1,
        what="The last token of a reply is not under the response mask.",
        file="turnwise/data/samples.py",
        old="        mask.extend([turn >= 0] * len(new))\n",
        new="        mask.extend([turn >= 0] * (len(new) - 1) + [False] * bool(new))\n",
        tests=DATA,
    ),
    Break(
        name="end-token-twice",
        invariant=1,
        what="The context repeats the end-of-turn token that the model sampled.",
        file="turnwise/rollout/context.py",
        old="self.renderer.token_text(ids[-1]) if ended else",
        new="self.renderer.token_text(ids[-1]) if ended and not ids else",
        tests=(ROLLOUT,),
    ),
    Break(
        name="reply-retokenised",
        invariant=1,
        what="A reply's ids are those of its decoded text, and not the sampled ones.",
        file="turnwise/rollout/context.py",
        old="                    completion=completion,\n",
        new=(
            "                    completion=type(completion)(\n"
            "                    ids=(said := (*self.renderer.encode(text), *ids[-1:] * ended)),\n"
            "                    logprobs=(*completion.logprobs, *said)[: len(said)],\n"
            "                    finish_reason=completion.finish_reason,\n"
            "                    policy_version=completion.policy_version,\n"
            "                    ),\n"
        ),
        tests=(f"{TRAINER}::test_the_ratio_is_one_before_the_first_update",),
    ),
    Break(
        name="ledger-silent",
        invariant=1,
        what="The ledger does not stop a run whose tokens changed on the way to training.",
        file="turnwise/train/step.py",
        old="    if entry.broken or entry.sampled_sha256 != entry.trained_sha256:\n",
        new="    if entry.broken < 0:\n",
        tests=(f"{TRAINER}::test_a_changed_token_stops_training",),
    ),
    # 2. Masks follow from who produced a token.
    Break(
        name="prompt-trained",
        invariant=2,
        what="Prompt tokens are under the response mask.",
        file="turnwise/data/samples.py",
        old="        add(turn.prompt_ids)\n",
        new="        add(turn.prompt_ids, turn=turn_id)\n",
        tests=DATA,
    ),
    Break(
        name="rewriting-missed",
        invariant=2,
        what="A chat template that drops a reply's thinking does not start a new context.",
        file="turnwise/chat/render.py",
        old="        if not rest.startswith(body):\n            return None\n",
        new="        if not rest.startswith(body):\n            return rest\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="prefix-unchecked",
        invariant=2,
        what="A template that changes what came before a reply does not start a new context.",
        file="turnwise/chat/render.py",
        old="        if not after.startswith(before):\n            return None\n",
        new="",
        tests=(f"{ROLLOUT}::test_a_template_that_changes_the_beginning_starts_a_sample_per_turn",),
    ),
    Break(
        name="contexts-joined",
        invariant=2,
        what="Two contexts of an episode become one sample.",
        file="turnwise/data/samples.py",
        old="    if turn.restart or index == 0:\n",
        new="    if index == 0:\n",
        tests=DATA,
    ),
    Break(
        name="turn-forged",
        invariant=2,
        what="Special tokens spelled out in a reply become special tokens of the next prompt.",
        file="turnwise/chat/controls.py",
        old="        if (self._any if strings else self._any_special).search(text) is not None:\n",
        new="        if False:\n",
        tests=(ROLLOUT,),
    ),
    # 3. loss_mask lies within response_mask; attention_mask depends on neither.
    Break(
        name="loss-mask-unchecked",
        invariant=3,
        what="A loss mask that reaches beyond the response mask is accepted.",
        file="turnwise/data/batch.py",
        old="        _refuse(self.loss_mask & ~responses, ",
        new="        _refuse(self.loss_mask & ~self.loss_mask, ",
        tests=DATA,
    ),
    Break(
        name="attention-from-responses",
        invariant=3,
        what="A row without a response is not attended to.",
        file="turnwise/data/batch.py",
        old="        attention_mask=real.long(),\n",
        new=(
            "        attention_mask=real.long()\n"
            "        * torch.tensor([[any(sample.response_mask)] for sample in samples]),\n"
        ),
        tests=DATA,
    ),
    Break(
        name="untrained-weighed",
        invariant=3,
        what="Tokens that are not trained on count in the denominator of the loss.",
        file="turnwise/algos/reduce.py",
        old="        batch.loss_mask, batch.episode_ids, algorithm.reduction,",
        new="        batch.response_mask, batch.episode_ids, algorithm.reduction,",
        tests=(f"{UPDATE}::test_a_row_that_is_not_trained_on_changes_no_gradient",),
    ),
    # 4. Observation tokens change no action token's advantage.
    Break(
        name="gae-over-observations",
        invariant=4,
        what="Token GAE walks through the observations between two turns.",
        file="turnwise/algos/ppo.py",
        old="    lay = build_layout(mask, turn_ids=turn_ids, episode_ids=episode_ids)\n",
        new="    lay = build_layout(mask.long().cumsum(-1) > 0, episode_ids=episode_ids)\n",
        tests=CONFORMANCE,
    ),
    Break(
        name="whitened-over-all",
        invariant=4,
        what="Advantages are whitened over observation tokens too.",
        file="turnwise/algos/credit.py",
        old="masked_whiten(advantages, batch.loss_mask, error=error)",
        new="masked_whiten(advantages, batch.attention_mask.bool(), error=error)",
        tests=CONFORMANCE,
    ),
    Break(
        name="turns-guessed",
        invariant=4,
        what="Bi-level GAE takes turns without an observation between them for one turn.",
        file="turnwise/algos/bi_level_gae.py",
        old="        turn_ids=batch.turn_ids,\n",
        new="        turn_ids=None,\n",
        tests=CONFORMANCE,
    ),
    # 5. Loss and gradient are the same for every micro-batch split, order and padding.
    Break(
        name="micro-batch-mean",
        invariant=5,
        what="Each micro-batch has its own denominator, as in a mean of means.",
        file="turnwise/train/update.py",
        old="self.policy, self.algorithm, part.batch\n",
        new=(
            "self.policy, self.algorithm, part.batch\n"
            "        micro = micro.replace(weights=token_weights(micro, algorithm))\n"
        ),
        tests=(UPDATE,),
    ),
    Break(
        name="rows-lost-in-split",
        invariant=5,
        what="The last micro-batch of a split is left out.",
        file="turnwise/data/batch.py",
        old="device=self.input_ids.device) for chunk in chunks]\n",
        new="device=self.input_ids.device) for chunk in chunks[: max(len(chunks) - 1, 1)]]\n",
        tests=DATA,
    ),
    Break(
        name="padding-counted",
        invariant=5,
        what="GSPO's mean log-ratio of a row is divided by the padded width.",
        file="turnwise/algos/losses.py",
        old="/ mask.sum(-1, keepdim=True).clamp(min=1)\n",
        new="/ mask.shape[-1]\n",
        tests=LOSSES,
    ),
    Break(
        name="packed-rows-mixed",
        invariant=5,
        what="Packed rows attend to the rows before them.",
        file="turnwise/models/packing.py",
        old="        for start, end in pairwise(boundaries.tolist())\n",
        new="        for start, end in pairwise([0, query.shape[2]])\n",
        tests=(f"{PACKING}::test_scores_and_values_are_those_of_the_padded_pass",),
    ),
    # 6. Terminated is not truncated.
    Break(
        name="terminated-bootstraps",
        invariant=6,
        what="A terminated episode bootstraps from the value of its last state.",
        file="turnwise/algos/critics.py",
        old="else torch.where(batch.truncated, batch.bootstrap, 0.0)",
        new="else batch.bootstrap",
        tests=GROUPS,
    ),
    Break(
        name="truncated-ends",
        invariant=6,
        what="A truncated episode does not bootstrap.",
        file="turnwise/algos/critics.py",
        old="    return None if bootstrap is None else bootstrap[lay.last_rows]\n",
        new="    return None\n",
        tests=CONFORMANCE,
    ),
    Break(
        name="critic-bootstraps-all",
        invariant=6,
        what="The critic gives a terminated row a bootstrap value.",
        file="turnwise/models/scoring.py",
        old="    return values, whole.masked_fill(~batch.truncated, 0.0)\n",
        new="    return values, whole\n",
        tests=(SCORING,),
    ),
    Break(
        name="turn-limit-completes",
        invariant=6,
        what="An episode that is cut by the turn limit ends as completed.",
        file="turnwise/rollout/agents.py",
        old="            return Status.TRUNCATED_TURNS\n",
        new="            return Status.COMPLETED\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="env-truncation-completes",
        invariant=6,
        what="An episode that its environment truncates ends as completed.",
        file="turnwise/rollout/agents.py",
        old="        if result.terminated:\n",
        new="        if result.done:\n",
        tests=(f"{ROLLOUT}::test_an_episode_that_its_environment_truncates_is_truncated",),
    ),
    Break(
        name="length-limit-ends",
        invariant=6,
        what="An episode that is cut by its context counts as terminated.",
        file="turnwise/types.py",
        old="        return self in (Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH)\n",
        new="        return self is Status.TRUNCATED_TURNS\n",
        tests=(f"{ROLLOUT}::test_full_context_truncates_by_length",),
    ),
    Break(
        name="last-words-lost",
        invariant=6,
        what="The bootstrap of a truncated episode does not see the last observation.",
        file="turnwise/data/samples.py",
        old="        add(episode.final_ids)\n",
        new="        pass\n",
        tests=(ROLLOUT,),
    ),
    # 7. A failure is a status, never a reward.
    Break(
        name="failure-completes",
        invariant=7,
        what="An environment that raises ends its episode as completed, with the reward so far.",
        file="turnwise/rollout/agents.py",
        old="        self.fail(Status.ENV_TIMEOUT if timed_out else Status.ENV_ERROR, error)\n",
        new="        self.fail(Status.ENV_TIMEOUT if timed_out else Status.COMPLETED, error)\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="generator-error-cuts",
        invariant=7,
        what="A generator that raises truncates the episode instead of failing it.",
        file="turnwise/rollout/proxy.py",
        old="            agent.fail(Status.GENERATOR_ERROR, error)\n        else:\n",
        new='            await agent.cut(Status.TRUNCATED_LENGTH, "")\n        else:\n',
        tests=(ROLLOUT,),
    ),
    Break(
        name="failure-kept",
        invariant=7,
        what="A failed episode stays in its group.",
        file="turnwise/rollout/proxy.py",
        old="        usable = bool(episode.turns) and not episode.status.failed\n",
        new="        usable = bool(episode.turns)\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="failure-sampled",
        invariant=7,
        what="A failed episode can become training samples.",
        file="turnwise/data/samples.py",
        old="    if episode.status.failed:\n",
        new="    if episode.status.failed and not episode.id:\n",
        tests=DATA,
    ),
    Break(
        name="nan-reward-is-zero",
        invariant=7,
        what="A reward that is not a number becomes a reward of zero.",
        file="turnwise/envs/gate/values.py",
        old="    if not math.isfinite(value):\n",
        new="    value = value if math.isfinite(value) else 0.0\n    if value != value:\n",
        tests=("turnwise/envs/gate/values.py",),
    ),
    Break(
        name="failed-env-reused",
        invariant=7,
        what="A retry may get the environment that failed instead of a fresh one.",
        file="turnwise/isolation/local.py",
        old="        if env is not None and self._sound:\n",
        new="        if env is not None:\n",
        tests=(f"{ROLLOUT}::test_an_environment_that_failed_is_closed_and_never_reset_again",),
    ),
    Break(
        name="failure-in-metrics",
        invariant=7,
        what="Rollout metrics count the rewards of failed episodes.",
        file="turnwise/log/metrics.py",
        old="    played = [episode for episode in episodes if not episode.status.failed]\n",
        new="    played = list(episodes)\n",
        tests=("tests/unit/test_log_metrics.py",),
    ),
    # 8. Groups.
    Break(
        name="group-tasks-differ",
        invariant=8,
        what="The members of a group play different tasks.",
        file="turnwise/rollout/plan.py",
        old="                    task=task,\n",
        new="                    task=probe.make_task(task.seed + index, split),\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="group-tokens-shared",
        invariant=8,
        what="The members of a group draw the same tokens.",
        file="turnwise/rollout/plan.py",
        old='f"tokens/{split}", moment, group_id, index)',
        new='f"tokens/{split}", moment, group_id)',
        tests=(ROLLOUT,),
    ),
    Break(
        name="episode-counts-twice",
        invariant=8,
        what="An episode counts once per row in its group's mean.",
        file="turnwise/algos/groups.py",
        old="    episode = rows if episode_ids is None else numbered(episode_ids)\n",
        new="    episode = rows\n",
        tests=GROUPS,
    ),
    Break(
        name="group-of-one-silent",
        invariant=8,
        what="A group of one gets an advantage of zero silently.",
        file="turnwise/algos/groups.py",
        old='    if singleton == "error" and bool(members.alone.any()):\n',
        new='    if singleton == "never":\n',
        tests=GROUPS,
    ),
    Break(
        name="small-group-kept",
        invariant=8,
        what="A group that failures left with one member is kept.",
        file="turnwise/rollout/proxy.py",
        old="        if group_id not in broken and len(members) >= smallest\n",
        new="        if group_id not in broken and len(members) >= min(smallest, 1)\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="untrained-has-a-say",
        invariant=8,
        what="An episode that is not trained on counts in its group's mean.",
        file="turnwise/algos/groups.py",
        old='        "counted": batch.loss_mask.any(-1),\n',
        new='        "counted": batch.response_mask.any(-1),\n',
        tests=GROUPS,
    ),
    # 9. Seeds come from named streams; train and validation tasks are disjoint.
    Break(
        name="streams-collide",
        invariant=9,
        what="Different names give the same seed: indices 3, 1 and 31.",
        file="turnwise/seeding.py",
        old=r'"\x1f".join(',
        new='"".join(',
        tests=("turnwise/seeding.py",),
    ),
    Break(
        name="seeds-from-hash",
        invariant=9,
        what="Seeds come from hash(), which differs between processes.",
        file="turnwise/seeding.py",
        old='int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1',
        new="hash(name) & (2**63 - 1)",
        tests=("turnwise/seeding.py", "turnwise/envs/games/frozen_lake.py"),
    ),
    Break(
        name="order-from-global-rng",
        invariant=9,
        what="The order of mini-batches comes from torch's global generator.",
        file="turnwise/train/update.py",
        old="torch.randperm(batch.num_rows, generator=generator)",
        new="torch.randperm(batch.num_rows)",
        tests=(f"{UPDATE}::test_the_order_of_mini_batches_ignores_the_global_generator",),
    ),
    Break(
        name="splits-overlap",
        invariant=9,
        what="FrozenLake's validation maps may be training maps.",
        file="turnwise/envs/games/frozen_lake.py",
        old='        if _is_val(rows) == (split != "train"):\n',
        new="        if rows:\n",
        tests=("tests/unit/test_envs_first.py",),
    ),
    Break(
        name="splits-share-a-stream",
        invariant=9,
        what="Training and validation draw their tasks from one stream of seeds.",
        file="turnwise/rollout/plan.py",
        old='derive_seed(config.seed, f"task/{split}", moment, group_id)',
        new='derive_seed(config.seed, "task", moment, group_id)',
        tests=(f"{ROLLOUT}::test_train_and_val_tasks_have_different_seeds",),
    ),
    Break(
        name="validation-moves",
        invariant=9,
        what="Validation tasks change with the step.",
        file="turnwise/rollout/plan.py",
        old='    moment = step if split == "train" else 0\n',
        new="    moment = step\n",
        tests=(ROLLOUT,),
    ),
    # 10. On the CPU a run is reproducible to the bit, killed and resumed too.
    Break(
        name="noise-by-row",
        invariant=10,
        what="A session's tokens depend on its row among the sessions of a pass.",
        file="turnwise/generate/slots/passes.py",
        old="            state.seed,\n            len(state.ids),",
        new="            state.seed + row,\n            len(state.ids),",
        tests=COMPANY,
    ),
    Break(
        name="prefill-shapes-vary",
        invariant=10,
        what="The shape of a prefill pass depends on how many sessions take part.",
        file="turnwise/generate/slots/passes.py",
        old="        num_rows = num_rows if self._exact else len(batch)\n",
        new="        num_rows = len(batch)\n",
        tests=COMPANY,
    ),
    Break(
        name="moments-lost",
        invariant=10,
        what="A resumed run begins with an empty optimizer.",
        file="turnwise/train/trainer.py",
        old='        self.learner.optimizer.load_tensors(tensors, "optimizer")\n',
        new="",
        tests=RESUMED,
    ),
    Break(
        name="lines-written-twice",
        invariant=10,
        what="A resumed run keeps the metrics that were written after its checkpoint.",
        file="turnwise/log/store.py",
        old="            os.ftruncate(self._files[name].fileno(), size)\n",
        new="",
        tests=RESUMED,
    ),
    Break(
        name="statistics-lost",
        invariant=10,
        what="A resumed run forgets its running reward statistics.",
        file="turnwise/train/trainer.py",
        old='        self.normalizer.load_state_dict(state["reward_statistics"])\n',
        new="",
        tests=(f"{TRAINER}::test_running_reward_statistics_survive_a_resume",),
    ),
    Break(
        name="torn-checkpoint-read",
        invariant=10,
        what="A checkpoint whose bytes changed is loaded.",
        file="turnwise/train/checkpoint.py",
        old="        if _sha256(path / name) != expected:\n",
        new="        if not (path / name).exists():\n",
        tests=("tests/unit/test_train_checkpoint.py",),
    ),
    # 11. What is sampled is what is scored.
    Break(
        name="temperature-unscored",
        invariant=11,
        what="Scoring leaves the temperature out.",
        file="turnwise/models/scoring.py",
        old="    return logits if temperature == 1.0 else logits / temperature\n",
        new="    return logits\n",
        tests=(SCORING,),
    ),
    Break(
        name="temperature-unreported",
        invariant=11,
        what="The sampler reports the log-prob at temperature 1, whatever it drew from.",
        file="turnwise/generate/sampling.py",
        old="    return ids, logprobs.gather(-1, ids[:, None])[:, 0]\n",
        new=(
            "    logprobs = torch.log_softmax(logits.float(), dim=-1)\n"
            "    return ids, logprobs.gather(-1, ids[:, None])[:, 0]\n"
        ),
        tests=(f"{HF}::test_logprobs_are_those_of_a_plain_forward_pass",),
    ),
    Break(
        name="scored-one-late",
        invariant=11,
        what="A token is scored by the state after it.",
        file="turnwise/models/packing.py",
        old="            return hidden[self.rows, self.columns - 1]\n",
        new="            return hidden[self.rows, self.columns]\n",
        tests=(SCORING,),
    ),
    Break(
        name="top-p-trained",
        invariant=11,
        what="Training accepts top-k and top-p.",
        file="turnwise/rollout/proxy.py",
        old="    if training and (config.top_k or config.top_p < 1.0):\n",
        new="    if training and config.top_k < 0:\n",
        tests=(ROLLOUT,),
    ),
    Break(
        name="gap-accepted",
        invariant=11,
        what="A sampler whose log-probs are far from the trainer's is accepted.",
        file="turnwise/train/update.py",
        old="        if not self.mean <= limit:\n",
        new="        if self.mean < 0.0:\n",
        tests=(UPDATE,),
    ),
    Break(
        name="gap-unreported",
        invariant=11,
        what="The gap between sampler and trainer is no metric of the step.",
        file="turnwise/train/update.py",
        old='        result |= {"train/gap_mean": gap.mean, "train/gap_max": gap.max}\n',
        new="",
        tests=(f"{UPDATE}::test_the_gap_to_the_sampler_is_a_metric_of_the_update",),
    ),
    Break(
        name="old-cache-kept",
        invariant=11,
        what="Keys and values of the old weights are used after an update.",
        file="turnwise/generate/hf.py",
        old=(
            '        self._requests.refuse_while_busy("update the weights")\n'
            "        self._requests.evict_all()\n"
            "        for state in self._requests.sessions.values():\n"
            "            state.drop_cache(rechunk=self._scheduler.chunk)\n"
        ),
        new='        self._requests.refuse_while_busy("update the weights")\n',
        tests=(f"{HF}::test_new_weights_are_used_for_the_whole_context",),
    ),
    Break(
        name="dropout-kept",
        invariant=11,
        what="Dropout stays on while the policy is scored in training mode.",
        file="turnwise/models/policy.py",
        old="            module.p = 0.0\n",
        new="            pass\n",
        tests=(f"{SCORING}::test_training_mode_scores_without_dropout",),
    ),
    # 12. NaN in a masked position reaches nothing; a knob without effect is refused.
    Break(
        name="nan-times-zero",
        invariant=12,
        what="The losses multiply by the mask instead of selecting.",
        file="turnwise/algos/losses.py",
        old="    return torch.where(mask, x, 0.0)\n",
        new="    return x * mask\n",
        tests=LOSSES,
    ),
    Break(
        name="nan-in-returns",
        invariant=12,
        what="An episode's return sums the rewards times the mask.",
        file="turnwise/algos/groups.py",
        old="    rewards = torch.where(mask, rewards.double(), 0.0)\n",
        new="    rewards = rewards.double() * mask\n",
        tests=CONFORMANCE,
    ),
    Break(
        name="idle-knob-accepted",
        invariant=12,
        what="A setting that the algorithm does not read is accepted.",
        file="turnwise/algos/table.py",
        old="        if not used and value != default:\n",
        new="        if not used and value is Ellipsis:\n",
        tests=("tests/numerics/test_algorithm.py",),
    ),
    Break(
        name="unknown-key-accepted",
        invariant=12,
        what="The config accepts keys that it does not know.",
        file="turnwise/config/schema.py",
        old='extra="forbid"',
        new='extra="ignore"',
        tests=("tests/unit/test_config.py",),
    ),
)
