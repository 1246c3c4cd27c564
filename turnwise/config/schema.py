"""The typed tree that configures a run. Refuses unknown keys; does not import torch.

Defaults are defined here, except those that depend on the model (base.py). Code receives the
sub-config that it needs, never the whole tree.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from turnwise.user_code import Kind, UnknownNameError, find_part

AlgorithmName = Literal[
    "ppo",
    "bi_level_gae",
    "turn_gae",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "gigpo",
    "hgpo",
    "gspo",
    "cispo",
]
GROUP_RELATIVE = ("grpo", "dr_grpo", "dapo", "rloo", "gigpo", "hgpo", "gspo", "cispo")
"""Algorithms whose baseline is the group's mean. A group of one has no signal."""
WITH_CRITIC = ("ppo", "bi_level_gae", "turn_gae")
"""Algorithms that train a critic besides the policy."""
Backend = Literal["native", "trl", "verl"]


def _own(kind: Kind) -> AfterValidator:
    """Accepts `module:name` and `file.py:name` without loading them, and a plain name if it is
    registered."""

    def check(name: str) -> str:
        if ":" not in name:
            try:
                find_part(kind, name)
            except UnknownNameError as error:
                raise ValueError(f"file.py:name of your own {kind}") from error
        return name

    return AfterValidator(check)


_OF_TEMPLATES = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"),
        *("namespace", "range", "dict", "loop", "self", "raise_exception", "strftime_now"),
        *("true", "false", "none", "True", "False", "None"),
        *("not", "and", "or", "in", "is", "if", "else", "for"),
    }
)
"""Names in templates that are no arguments."""
Isolation = Literal["auto", "inline", "thread", "process"]


class Section(BaseModel):
    """A section of the config: frozen, refuses unknown keys, documents every field."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """0: no LoRA. Otherwise the adapters' rank; the frozen base then serves as the reference
    policy."""
    alpha: float = 32.0
    """Scale of the adapters (alpha / rank multiplies them)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Which modules get adapters."""


class EmbeddedConfig(Section):
    """The small model that is built locally when no model is given."""

    hidden_size: int = Field(default=64, ge=8)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    warmstart_episodes: int = Field(default=2000, ge=0)
    """Transcripts of a random legal player that the model imitates before training. They teach the
    format only."""
    warmstart_epochs: int = Field(default=2, ge=0)
    warmstart_lr: float = Field(default=3e-3, gt=0)
    warmstart_observations: bool = False
    """Imitate the environment's messages too, not only the replies: the model learns the effect of
    each action, but not how to win."""

    @model_validator(mode="after")
    def _divides(self) -> "EmbeddedConfig":
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads, got {self.hidden_size} and "
                f"{self.num_heads}"
            )
        return self


class ModelConfig(Section):
    path: str | None = None
    """A Hugging Face model: a directory or a hub name. None: the embedded small model, built
    locally."""
    gguf_file: str | None = None
    """Name of a GGUF file inside `path`, to load and dequantise."""
    adapter: str | None = None
    """A folder with a LoRA adapter, merged into the model on loading; of a run,
    checkpoints/STEP/adapter."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not at `path`."""
    chat_template: str | None = None
    """A Jinja template, or the path of one, in place of the tokenizer's own."""
    chat_template_args: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict[str, bool | int | float | str | None]
    )
    """Variables that the chat template reads, such as {enable_thinking: false} of Qwen3. They
    become part of the template, also in stored models."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights in use. auto: bfloat16 on CUDA, float32 on the CPU. Trained weights
    have float32 master copies."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Keep only each layer's input and run layers again in the backward pass. auto: on CUDA, if
    memory is short."""
    trust_remote_code: bool = False
    critic: Literal["separate", "shared"] = "separate"
    """The value head has its own trunk, or shares the policy's."""
    lora: LoraConfig = LoraConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()

    @field_validator("chat_template_args")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.isidentifier() or name in _OF_TEMPLATES:
                raise ValueError(f"names variables of a chat template, got {name!r}")
        return value


class FormatConfig(Section):
    """The format of actions, and the penalty for a malformed reply. Never changes the model's
    text."""

    style: Literal["answer", "raw"] = "answer"
    """answer: <answer>a || b</answer>, with <think>..</think> before it if `think` is on. raw: the
    whole reply."""
    think: bool = True
    """Ask for, and require, <think>..</think> before the answer. False where the style is raw."""
    action_sep: str = "||"
    """Separates several actions in one answer."""
    max_actions_per_turn: int = Field(default=5, ge=1)
    """Actions beyond this many in one reply are not played."""
    format_penalty: float = Field(default=-0.1, le=0.0)
    """Added to the reward of a turn whose reply has no legal action in the required format."""
    reminder: Literal["invalid", "always", "never"] = "invalid"
    """When a user message repeats the required format: after a malformed reply, in every turn, or
    never."""
    spell_out: bool = False
    """Show every legal reply in the format reminder, as in <answer>up</answer> or
    <answer>down</answer>: small models copy. If any text is legal, there is no reminder and the
    instruction has to show the format."""

    @model_validator(mode="before")
    @classmethod
    def _raw_has_no_thoughts(cls, given: Any) -> Any:
        """So that a stored config says what was done, and can be given again."""
        if not isinstance(given, Mapping):
            return given
        told = cast(Mapping[str, Any], given)
        return {"think": False, **told} if told.get("style") == "raw" else told


class ShapingConfig(Section):
    turn_cost: float = Field(default=0.0, le=0.0)
    """Added to every turn's reward."""
    potential_coef: float = Field(default=0.0, ge=0.0)
    """Weight of potential-based shaping, for environments with a `potential()`."""
    potential_gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount of the next state's potential. Shaping preserves the optimal policy if this is the
    turn-level discount."""
    normalize: Literal["none", "state", "batch", "running"] = "none"
    """Normalise rewards by the statistics of a group, of the batch, or of the run so far."""
    normalize_std: bool = True
    """Divide by the standard deviation as well as subtracting the mean."""
    clip: float | None = Field(default=None, gt=0.0)
    """Clip each turn's reward to [-clip, clip]."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Soft punishment of long replies, as in DAPO: it begins this many tokens before
    rollout.max_response_tokens and grows to overlong_penalty there. 0: off."""
    overlong_penalty: float = Field(default=1.0, ge=0.0)
    """Penalty of a reply of rollout.max_response_tokens, if overlong_tokens is set."""
    function: str | None = None
    """Your own shaper, as file.py:function or a registered name. Its result is added to every
    turn's reward, after the clip."""


class EnvConfig(Section):
    name: str = "frozen_lake"
    """A registered name (`turnwise envs`), or module:Class."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the environment's constructor."""
    reset_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of every reset."""
    format: FormatConfig = FormatConfig()
    shaping: ShapingConfig = ShapingConfig()
    max_turn: int | None = Field(default=None, ge=1)
    """Turns per episode with this environment. None: train.max_turn."""
    max_actions_per_episode: int | None = Field(default=None, ge=1)
    """Actions per episode, over all turns. None: no limit."""
    system_prompt: str | None = None
    """Replaces the environment's own instruction."""
    single_turn: bool | None = None
    """None: determined by the environment."""


class GroupsConfig(Section):
    """The episodes of one rollout: `env_groups` groups of `group_size` members, divided among
    tags."""

    env_groups: int = Field(default=8, ge=1)
    """Groups per rollout. A group shares its task and initial state."""
    group_size: int = Field(default=16, ge=1)
    """Episodes per group."""
    tags: tuple[str, ...] = ()
    """Names of entries of `envs`, or registered environment names. Empty: the environment of
    `env`."""
    n_groups: tuple[int, ...] = ()
    """Groups per tag; adds up to env_groups. Empty: divided evenly."""

    @model_validator(mode="after")
    def _consistent(self) -> "GroupsConfig":
        if self.n_groups and len(self.n_groups) != len(self.tags):
            raise ValueError(
                f"n_groups has one number per tag, got {len(self.n_groups)} for {len(self.tags)} "
                "tags"
            )
        if self.n_groups and sum(self.n_groups) != self.env_groups:
            raise ValueError(
                f"n_groups must add up to env_groups = {self.env_groups}, got {sum(self.n_groups)}"
            )
        return self


HELD_OUT = {"env_groups": 256, "group_size": 1}
"""An evaluation plays many tasks, each once."""


class RolloutConfig(Section):
    train: GroupsConfig = GroupsConfig()
    val: GroupsConfig = GroupsConfig.model_validate(HELD_OUT)
    window: Literal["full", "last_k", "single_turn"] = "full"
    """The part of the conversation that the model sees: everything; the last `window_turns` turns;
    only the current state."""
    window_turns: int = Field(default=3, ge=1)
    max_response_tokens: int = Field(default=256, ge=1)
    """Tokens per reply."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens per context, prompt and replies together. None: the model's limit."""
    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    """Refused in training: it changes the sampled distribution but not the scored one."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Refused in training, like top_k."""
    eval_temperature: float = Field(default=0.0, ge=0.0)
    """0.0: greedy evaluation."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply, besides the end-of-turn token."""
    response_prefix: str = ""
    """Text that every reply begins with, such as <answer>. It is part of the prompt: never sampled
    and never trained on. Environments receive it with the reply."""
    break_control: Literal["observations", "all", "none"] = "observations"
    """Where control strings of the chat template, such as </think> and <tool_call>, are prevented
    from becoming control tokens: in messages of environments and tools; in system messages too;
    nowhere. Special tokens, such as the end of a turn, are always prevented."""
    slots: int = Field(default=64, ge=1)
    """Sequences that the in-process engine decodes at once."""
    isolation: Isolation = "auto"
    """Where environments run. auto: inline if a step is cheap (measured), else in worker
    processes."""
    num_workers: int = Field(default=2, ge=1)
    """Threads or worker processes for environments."""
    reset_timeout: float = Field(default=60.0, gt=0.0)
    """Seconds for a reset. A program's counts from the moment a worker has it."""
    step_timeout: float = Field(default=30.0, gt=0.0)
    """Seconds for a step."""
    generate_timeout: float = Field(default=600.0, gt=0.0)
    """Seconds for one reply of the model."""
    stall_timeout: float = Field(default=120.0, gt=0.0)
    """Seconds without a turn or an episode after which a rollout says what it waits for."""
    worker_envs: int | None = Field(default=None, ge=1)
    """Environments per worker process at once; further episodes wait. None: 64, or all in
    lockstep."""
    worker_memory_mb: int | None = Field(default=None, ge=64)
    """Memory limit of one worker process."""
    retries: int = Field(default=1, ge=0)
    """How often a failed episode is restarted with a fresh environment."""
    on_failure: Literal["drop", "drop_group"] = "drop"
    """drop: drop a failed episode. drop_group: drop its whole group. A failure never becomes a
    reward."""
    min_group_size: int = Field(default=2, ge=1)
    """A group with fewer members left than this is dropped (one member is enough if group_size is
    1)."""
    enough_groups: int | None = Field(default=None, ge=1)
    """A training rollout ends once so many of its groups (`train.env_groups`) are over, and the
    slower ones are dropped. That favours short episodes, and which groups are trained depends on
    time. None: all groups."""
    agent: str = "default"
    """The agent class between an environment and the model: registered (`@register_agent`) or
    file.py:Class."""
    generator: str | None = None
    """A function that creates the generator for training, as file.py:function or a registered name.
    None: turnwise's own generator."""

    @field_validator("val", mode="before")
    @classmethod
    def _held_out(cls, value: Any) -> Any:
        """If only some keys of `val` are given, the others keep the defaults of `val`."""
        if not isinstance(value, Mapping):
            return value
        return {**HELD_OUT, **cast(Mapping[str, Any], value)}

    @model_validator(mode="after")
    def _consistent(self) -> "RolloutConfig":
        if self.enough_groups is not None and self.enough_groups > self.train.env_groups:
            raise ValueError(
                f"enough_groups = {self.enough_groups} is more than a rollout has: "
                f"train.env_groups = {self.train.env_groups}"
            )
        return self


class AlgoConfig(Section):
    name: AlgorithmName | Annotated[str, _own("algorithm")] = "bi_level_gae"
    """Preset of advantage, ratio, surrogate and reduction; the fields below refine it. Or your own
    advantage estimator, as file.py:function or a registered name."""
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Token-level discount."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Token-level GAE lambda."""
    high_level_gamma: float = Field(default=0.95, gt=0.0, le=1.0)
    """Turn-level discount of bi-level and turn-level GAE, GiGPO and HGPO."""
    high_level_lam: float | None = Field(default=None, ge=0.0, le=1.0)
    """Turn-level lambda. None: the same as lam."""
    turn_value: Literal["last", "first"] = "last"
    """Bi-level GAE: which token's value is used as the value of the turn."""
    last_token: Literal["replace", "add"] = "replace"
    """Bi-level GAE: the turn's advantage replaces the last token's delta, or is added to it."""
    whiten: bool | None = None
    """Whiten advantages over the batch's action tokens. None: the preset's choice."""
    clip_low: float | None = Field(default=None, ge=0.0)
    """Lower clip range of the ratio. None: the preset's (0.2)."""
    clip_high: float | None = Field(default=None, ge=0.0)
    """Upper clip range of the ratio. None: the preset's (0.2; DAPO 0.28)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound for negative advantages. None: off."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Clip range of the value loss. None: off."""
    value_coef: float = Field(default=0.5, ge=0.0)
    """Weight of the value loss if the critic shares the policy's trunk."""
    entropy_coef: float = 0.0
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy. 0: no reference model is kept."""
    kl_form: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt kl_coef towards this KL. None: fixed."""
    reduction: Literal["token_mean", "episode_mean", "sequence_mean", "token_sum_norm"] | None = (
        None
    )
    """None: the preset's choice."""
    norm_tokens: float = Field(default=1024.0, gt=0.0)
    """The constant that token_sum_norm divides by, as in Dr.GRPO. It only scales the loss."""
    surrogate: Literal["clip", "cispo", "policy_gradient"] | Annotated[str, _own("loss")] | None = (
        None
    )
    """How the ratio enters the gradient, or your own loss per token, as file.py:function or a
    registered name. None: the preset's choice."""
    ratio_level: Literal["token", "sequence"] | None = None
    """One importance ratio per token, or one per sequence (GSPO). None: the preset's choice."""
    tis_cap: float | None = Field(default=None, gt=0.0)
    """Cap of truncated importance sampling between sampler and trainer. None: off, unless the
    sampler is another engine."""
    singleton: Literal["error", "zero"] = "error"
    """A group of one has no baseline: raise an error, or set its advantage to zero and count it."""
    penalty_only_groups: Literal["drop", "train"] | None = None
    """Groups whose episodes differ in nothing but format penalties, none having succeeded: give
    them no advantage, or train on them like on others. Group-relative algorithms only. None: drop
    them, but TRL trains on them."""
    filter: Literal["none", "variance_top_p", "variance_top_k", "dynamic"] = "none"
    """Which groups are trained on, by the variance of their episodes' rewards."""
    filter_keep: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the variance (top_p) or of the groups (top_k) to keep."""
    gigpo_weight: float = Field(default=1.0, ge=0.0)
    """Weight of GiGPO's step advantage."""
    gigpo_std: bool = True
    """GiGPO: divide by the standard deviation too, besides subtracting the mean."""
    hgpo_history: int = Field(default=2, ge=0)
    """HGPO: a turn is also compared with those that share up to this many states before its own."""
    hgpo_alpha: float = Field(default=1.0, ge=0.0)
    """HGPO: a comparison that shares n states weighs (n + 1) ** alpha. 0: all weigh the same."""
    hgpo_std: bool = True
    """HGPO: divide by the standard deviation too, besides subtracting the mean."""
    hgpo_episode: bool = False
    """HGPO: the episode among its group is a comparison too, with weight 1."""


class TrainConfig(Section):
    multi_turn: bool = True
    """False: single-turn, also on plain prompts from a file."""
    max_turn: int = Field(default=5, ge=1)
    """Turns per episode, unless the environment has its own limit."""
    steps: int = Field(default=100, ge=0)
    """Rollout-and-update iterations. 0: only imitate `sft.source`."""
    max_minutes: float | None = Field(default=None, gt=0.0)
    """Start no further step after this many minutes; the run then ends as after its last step.
    None: no limit."""
    time_limit: float | None = Field(default=None, gt=0.0)
    """Minutes after which the run stops as on SIGTERM: it writes a checkpoint and a report and
    prints the command to resume, without the last evaluation. None: no limit."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each rollout."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass. A group's episodes may be in different mini-batches."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Tokens per forward and backward pass, including padding unless rows are packed. Changes
    memory, never the result. auto: as many as fit in memory on CUDA, 16384 elsewhere."""
    packing: Literal["auto"] | bool = "auto"
    """Concatenate rows instead of padding them. auto: on CUDA, if the model's attention allows
    it."""
    lr: float = Field(default=1e-6, gt=0.0)
    critic_lr: float = Field(default=1e-5, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    critic_warmup: int = Field(default=0, ge=0)
    """Steps that train only the critic."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    target_kl: float | None = Field(default=None, gt=0.0)
    """Skip a step's remaining epochs once the approximate KL to the sampling policy exceeds
    this."""
    max_idle_steps: int = Field(default=10, ge=1)
    """Stop after this many consecutive steps in which no group differed in reward (no learning
    signal)."""
    max_collapsed_steps: int = Field(default=5, ge=0)
    """Stop after this many consecutive steps in which every reply is the same and nothing succeeds
    (docs/metrics.md defines it). 0: never."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    deterministic: bool | None = None
    """Bitwise reproducible. None: on where possible (the CPU)."""
    compile: bool = False
    """On CUDA, compile the layers for the update, and for decoding if the model has no fused pass.
    The first step takes longer."""
    max_gap: float = Field(default=0.1, gt=0.0)
    """Largest allowed mean gap between the sampler's and the trainer's log-probs at step 0 of an
    update. Above it, the run stops."""

    @property
    def token_limit(self) -> int:
        """micro_batch_tokens as a number, where no memory plan is made."""
        return 16384 if self.micro_batch_tokens == "auto" else self.micro_batch_tokens


class SftConfig(Section):
    """Imitation of demonstrations: alone (`turnwise sft`), or before training."""

    source: tuple[str, ...] = ()
    """Demonstrations: players (expert, random, openai:URL#MODEL, script:FILE.py:FUNCTION), run
    directories, files of episodes or of messages (JSONL, also .gz). With a source, `turnwise train`
    imitates first and trains the result."""
    episodes: int = Field(default=256, ge=1)
    """Episodes that each player of `source` plays, each a training task of its own."""
    slips: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of a player's turns in which a random legal action is played in its place. Such a turn
    is shown and not learned: the model learns how to go on after a mistake."""
    keep: Literal["all", "success"] | Annotated[int, Field(ge=1)] = "all"
    """all: learn from every episode. success: only from those that succeeded. A number: from that
    many episodes of each task, the best by reward, and from none that failed."""
    limit: int | None = Field(default=None, ge=1)
    """Learn from at most so many episodes, the first of those that `keep` lets through."""
    retokenize: bool = False
    """Render the texts of stored episodes with this model's chat template. False: their stored ids
    are learned, and ids of another tokenizer are refused."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the demonstrations."""
    batch_tokens: int = Field(default=32768, ge=1)
    """Tokens per optimizer step, prompts included. Changes the result, unlike
    train.micro_batch_tokens."""
    lr: float = Field(default=1e-5, gt=0.0)
    """Rises over the first 5 % of the steps and falls to 0 over the last 30 %."""
    held_out: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the tasks whose demonstrations are only predicted, before training and after every
    epoch. 0: none."""
    observations: float = Field(default=0.0, ge=0.0)
    """Weight of the loss on the environment's answers; a token of a reply has weight 1. Above 0,
    the model also learns what its actions do."""

    @field_validator("source", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class DataConfig(Section):
    """Plain prompts for single-turn training without an environment."""

    prompts: str | None = None
    """A JSONL or parquet file. Each row has a prompt (text or messages) and the columns that the
    reward needs."""
    val_prompts: str | None = None
    """A file of held-out prompts. None: a share `val_fraction` of `prompts`."""
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    """The right answer, for the rewards exact and math. A dot leads into a column of columns."""
    reward: str | None = None
    """The reward function, as module:function; called with prompt, completion and the row's other
    columns. Or exact (the same number or text as the answer) or math (as math-verify compares)."""
    val_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    epochs: int | None = Field(default=None, ge=1)
    """End after as many prompts as this many passes over the training prompts have, in place of
    train.steps. Prompts are drawn at random."""


class EvalConfig(Section):
    every: int = Field(default=0, ge=0)
    """Steps between evaluations. 0: only before and after."""
    episodes: int = Field(default=256, ge=1)
    """Held-out episodes per evaluation."""
    before: bool = True
    after: bool = True
    baselines: bool | None = None
    """Also evaluate a random player, the best blind player and an expert, if the environment has
    them. None: for the environments that come with turnwise."""


class LogConfig(Section):
    dir: str = "runs"
    """Parent folder of the run directories."""
    name: str | None = None
    """Name of the run directory. None: made from the environment, the algorithm and the seed."""
    project: str = "turnwise"
    """The project name in trackers."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    episodes_every: int = Field(default=1, ge=0)
    """Store the episodes of every n-th step. 0: none."""
    credit: bool = True
    """Store advantages, values, log-prob gaps and entropies per token with the episodes."""
    callbacks: tuple[str, ...] = ()
    """Your own callbacks (`turnwise.Callback`), as file.py:Class or registered names."""
    report: bool = True
    """Write report.html during the run and at its end."""

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip(". ") or "/" in value or "\\" in value):
            raise ValueError(
                f"names one folder, without slashes, got {value!r}; set log.dir to the parent "
                "folder"
            )
        return value


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=0)
    """Steps between checkpoints. 0: only the last."""
    keep: int = Field(default=2, ge=1)
    """How many checkpoints to keep."""
    write: bool = True
    """False: write no checkpoints, so the run cannot be resumed. For trials of large models, whose
    checkpoints fill a disk."""


class Config(Section):
    """A whole run."""

    seed: int = Field(default=0, ge=0)
    """All randomness is derived from it."""
    backend: Backend = "native"
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    """The environment, if the run has only one."""
    envs: dict[str, EnvConfig] = Field(default_factory=dict[str, EnvConfig])
    """Environments by tag, if the run mixes several."""
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig = SftConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trl: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of TRL's GRPOConfig; only with backend trl."""
    verl: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further keys of verl's config, dotted; only with backend verl."""

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        for backend, extra in (("trl", self.trl), ("verl", self.verl)):
            if extra and self.backend != backend:
                raise ValueError(
                    f"settings under '{backend}' are not used by backend {self.backend!r}; "
                    f"remove them or set backend: {backend}"
                )
        if self.rollout.enough_groups is not None and self.train.deterministic is True:
            raise ValueError(
                "train.deterministic: true contradicts rollout.enough_groups, where time decides "
                "which groups are trained; remove one"
            )
        if self.train.steps == 0 and not self.sft.source:
            raise ValueError("train.steps: 0 trains nothing; raise it, or set sft.source")
        if self.sft.source and self.backend != "native":
            raise ValueError(
                f"sft.source is for backend native, and this is {self.backend!r}; run "
                "`turnwise sft` first and give its model to model.path"
            )
        return self
