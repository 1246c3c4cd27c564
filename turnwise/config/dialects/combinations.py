"""Keys of other projects that must be read together, such as `adv_estimator` and `bi_level_gae`.

Each function takes the facts (key as written -> value), the tree so far and `note`, which says of a
key what it means here, and returns settings under our names. It raises ValueError with the reason,
one per line, where the facts contradict each other or mean nothing here.
"""

from collections.abc import Callable
from typing import Any, cast

from turnwise.config.dialects.data_files import (
    BUFFERS,
    FILES,
    OVERRIDES,
    PLACES,
    REWARD,
    epochs,
    files,
    nodes,
    overlong,
)
from turnwise.config.dialects.environments import custom_env, verl_agent_env
from turnwise.config.dialects.keys import ESTIMATORS
from turnwise.config.dialects.ragen import FILTER_KEYS
from turnwise.config.dialects.rules import Note
from turnwise.config.dialects.runs import RESUMES, ROLLOUT, VAL, flag, purpose, sampling, steps
from turnwise.config.schema import WITH_CRITIC
from turnwise.config.tree import Tree, default_at, get_path, is_tree

_ACTOR = "actor_rollout_ref.actor"
_FILTER = "actor_rollout_ref.rollout.rollout_filter_"


def _estimator(facts: Tree, seen: Tree, note: Note) -> Tree:
    flags = [flag(facts, key) for key in ("train_cfgs.bi_level_gae", "algorithm.bi_level_gae")]
    if True in flags and False in flags:
        raise ValueError(
            "train_cfgs.bi_level_gae and algorithm.bi_level_gae contradict each other; keep one"
        )
    bi_level = True if True in flags else False if False in flags else None
    given = facts.get("algorithm.adv_estimator") or facts.get("train_cfgs.advantage_estimator")
    mode = facts.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode not in ("vanilla", "gspo"):
        raise ValueError(f"{_ACTOR}.policy_loss.loss_mode is vanilla or gspo here, got {mode!r}")
    if given is None and (mode == "gspo" or facts.get("algorithm.filter_groups.enable")):
        raise ValueError("needs algorithm.adv_estimator: grpo beside it, or set algo.name")
    if given is None:
        if bi_level:
            return {"algo.name": "bi_level_gae"}
        current = get_path(seen, "algo.name") or default_at("algo.name")
        return {"algo.name": "ppo"} if bi_level is False and current == "bi_level_gae" else {}
    if not isinstance(given, str) or given not in ESTIMATORS:
        raise ValueError(
            f"{given!r} is not a known estimator: algorithm.adv_estimator is one of "
            f"{', '.join(ESTIMATORS)}"
        )
    name = ESTIMATORS[given]
    if bi_level and name not in ("ppo", "bi_level_gae"):
        raise ValueError(
            f"adv_estimator {given!r} contradicts bi_level_gae: true, which refines gae; keep one"
        )
    if bi_level is False and name == "bi_level_gae":
        raise ValueError("adv_estimator bi_level_gae contradicts bi_level_gae: false; keep one")
    settings: Tree = {"algo.name": "bi_level_gae" if bi_level else name}
    if name == "grpo" and mode == "gspo":
        settings["algo.name"] = "gspo"
    elif name == "grpo" and facts.get("algorithm.norm_adv_by_std_in_grpo") is False:
        settings["algo.name"] = "dr_grpo"
    if facts.get("algorithm.filter_groups.enable"):
        settings["algo.filter"] = "dynamic"
    return settings


def _discount(facts: Tree, seen: Tree, note: Note) -> Tree:
    """verl's one gamma is per token with a critic, per turn in GiGPO and HGPO; others have none."""
    name, gamma = get_path(seen, "algo.name") or default_at("algo.name"), facts["algorithm.gamma"]
    if name in ("gigpo", "hgpo"):
        return {"algo.high_level_gamma": gamma}
    if name in WITH_CRITIC or name == "reinforce_pp" or gamma == 1.0 or ":" in name:
        return {"algo.gamma": gamma}
    note("algorithm.gamma", f"{name} discounts nothing")
    return {}


def _agents(facts: Tree, seen: Tree, note: Note) -> Tree:
    """agent_length agents play one episode each; agent i plays the (i mod n)-th of the n
    templates."""
    template = facts.get("env_template")
    if template is not None and not (isinstance(template, list | tuple) and template):
        raise ValueError(f"env_template is a list with one environment per agent, got {template!r}")
    templates = cast("list[Any]", template or [])
    agents = facts.get("agent.agent_length", len(templates))
    if not isinstance(agents, int) or isinstance(agents, bool) or agents < 1:
        raise ValueError(f"agent.agent_length is the number of agents, 1 at least, got {agents!r}")
    if len(templates) > agents:
        raise ValueError(
            f"env_template has {len(templates)} entries for agent.agent_length = {agents} agents"
        )
    size = get_path(seen, "rollout.train.group_size") or 1
    if not isinstance(size, int) or agents % size:
        raise ValueError(
            f"{agents} agents do not divide into groups of rollout.train.group_size = {size}"
        )
    groups = agents // size
    settings: Tree = {"rollout.train.env_groups": groups, "rollout.train.group_size": size}
    counts: dict[str, int] = {}
    for index in range(groups if templates else 0):
        item = templates[index % len(templates)]
        tag, env = _template(item, index % len(templates))
        counts[tag] = counts.get(tag, 0) + 1
        if env:
            settings.setdefault("envs", {})[tag] = env
    if len(templates) > groups:
        raise ValueError(
            f"env_template has {len(templates)} entries for {groups} groups; a group shares one "
            "environment"
        )
    if counts:
        settings["rollout.train.tags"] = list(counts)
        settings["rollout.train.n_groups"] = list(counts.values())
    return settings


def _template(item: Any, index: int) -> tuple[str, Tree]:
    """Tag and settings of one entry of env_template: a name, or the keys of `env` or `env_cfgs`."""
    if isinstance(item, str):
        return item, {}
    if not is_tree(item):
        raise ValueError(
            f"an entry of env_template is an environment's name or its settings, got {item!r}"
        )
    known = {"env_name": "name", "max_episode_length": "max_actions_per_episode"}
    env: Tree = {known.get(str(key), str(key)): value for key, value in item.items()}
    tag = env.pop("tag", None) or f"agent_{index}"
    return str(tag), env


def _kl(facts: Tree, seen: Tree, note: Note) -> Tree:
    pairs = (
        ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef", "loss"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "reward"),
    )
    on = [pair for pair in pairs if flag(facts, pair[0])]
    if len(on) == 2:
        raise ValueError(
            "a KL in the loss and one in the reward are not supported together; keep one"
        )
    if on:
        switch, coef, where = on[0]
        if coef not in facts:
            raise ValueError(f"{switch} needs its weight: set {coef}")
        return {"algo.kl_coef": facts[coef], "algo.kl_in": where}
    for switch, coef, _ in pairs:
        if facts.get(coef) and switch not in facts:
            raise ValueError(f"{coef} counts only with {switch}; set that too, or use algo.kl_coef")
    return {"algo.kl_coef": 0.0}


def _precision(facts: Tree, seen: Tree, note: Note) -> Tree:
    names = {"train_cfgs.bf16": "bfloat16", "train_cfgs.fp16": "float16"}
    on = [name for key, name in names.items() if flag(facts, key)]
    if len(on) == 2:
        raise ValueError("bf16 and fp16 exclude each other; keep one")
    return {"model.dtype": on[0] if on else "float32"}


def _lora(facts: Tree, seen: Tree, note: Note) -> Tree:
    used = flag(facts, "lora_cfgs.use_lora")
    if used is None:
        raise ValueError(
            "lora_cfgs.r counts only with lora_cfgs.use_lora; set that too, or use model.lora.rank"
        )
    if not used:
        return {"model.lora.rank": 0}
    if "lora_cfgs.r" not in facts:
        raise ValueError("lora_cfgs.use_lora needs the rank: set lora_cfgs.r")
    return {"model.lora.rank": facts["lora_cfgs.r"]}


def _environment_use(facts: Tree, seen: Tree, note: Note) -> Tree:
    if flag(facts, "agent_proxy.use_environment"):
        return {}
    if get_path(seen, "data.prompts") is None:
        raise ValueError(
            "without an environment there must be prompts: set data.prompts and data.reward"
        )
    return {"train.multi_turn": False}


def _normalization(facts: Tree, seen: Tree, note: Note) -> Tree:
    prefix = "agent_proxy.reward_normalization"
    method = facts.get(f"{prefix}.method", "identity")
    grouping = facts.get(f"{prefix}.grouping", "batch")
    if method == "identity":
        return {"env.shaping.normalize": "none"}
    if method not in ("mean", "mean_std") or grouping not in ("state", "batch"):
        raise ValueError(
            f"method {method!r} with grouping {grouping!r} is not supported: methods are "
            "identity, mean and "
            "mean_std, groupings state and batch"
        )
    return {"env.shaping.normalize": grouping, "env.shaping.normalize_std": method == "mean_std"}


def _custom_envs(facts: Tree, seen: Tree, note: Note) -> Tree:
    """The environments that a rollout plays. Without tags none is played: all that can be are
    kept, and the others noted."""
    custom = facts["custom_envs"]
    if not is_tree(custom) or not all(is_tree(keys) for keys in custom.values()):
        raise ValueError(f"custom_envs holds the settings of environments by tag, got {custom!r}")
    tags = [
        tag for split in ("train", "val") for tag in get_path(seen, f"rollout.{split}.tags") or ()
    ]
    settings: Tree = {}
    problems: list[str] = []
    for tag, keys in cast(Tree, custom).items():
        if tags and tag not in tags:
            continue
        env, wrong = custom_env(str(tag), keys, note)
        problems += wrong
        if not wrong:
            settings[tag] = env
        elif not tags:
            note(f"custom_envs.{tag}", "it is left out: " + "; ".join(wrong))
    if problems and tags:
        raise ValueError("\n".join(problems))
    return {"envs": settings}


def _turn_scores(facts: Tree, seen: Tree, note: Note) -> Tree:
    if not flag(facts, "agent_proxy.use_turn_scores"):
        note(
            "agent_proxy.use_turn_scores",
            "a turn's reward always stands on that turn's last token, not on the episode's last",
        )
    return {}


def _verl_agent(facts: Tree, seen: Tree, note: Note) -> Tree:
    if "env.history_length" not in facts:
        note(
            "env.history_length",
            "verl-agent shows the last 2 turns where it is not set; here rollout.window shows all",
        )
    return {"env.name": verl_agent_env(facts["env.env_name"])}


def _window(facts: Tree, seen: Tree, note: Note) -> Tree:
    if (length := facts.get("env.history_length")) is not None:
        note("env.history_length", "earlier turns are shown as a conversation, not as text")
        return (
            {"rollout.window": "last_k", "rollout.window_turns": length}
            if length
            else {"rollout.window": "single_turn"}
        )
    mode, turns = (
        facts.get(f"agent_proxy.{key}") for key in ("context_window_mode", "max_context_window")
    )
    if mode not in (None, "full", "limited_multi_turn", "single_turn"):
        raise ValueError(
            "agent_proxy.context_window_mode is full, limited_multi_turn or single_turn, got "
            f"{mode!r}"
        )
    if not isinstance(turns, int) or turns < 1:
        if mode == "single_turn":
            note("agent_proxy.context_window_mode", "earlier turns are not shown")
        return {"rollout.window": "single_turn" if mode == "single_turn" else "full"}
    if mode == "full":
        note("agent_proxy.max_context_window", "the mode full shows all turns")
        return {"rollout.window": "full"}
    if mode == "single_turn":
        note("agent_proxy.context_window_mode", "earlier turns are shown as a conversation")
    return {"rollout.window": "last_k", "rollout.window_turns": turns}


def _shared_history(facts: Tree, seen: Tree, note: Note) -> Tree:
    """HGPO compares as many states before a turn's own as its prompt shows."""
    hgpo = get_path(seen, "algo.name") == "hgpo"
    return {"algo.hgpo_history": facts["env.history_length"]} if hgpo else {}


def _filter(facts: Tree, seen: Tree, note: Note) -> Tree:
    """RAGEN's group filters: by ratio (older files), or by strategy and value."""
    given = {key: facts[f"{_FILTER}{key}"] for key in FILTER_KEYS if f"{_FILTER}{key}" in facts}
    ours = {"top_p": "variance_top_p", "top_k": "variance_top_k"}
    keep = given.get("ratio", given.get("value", 1.0))
    strategy = given.get("strategy", "top_k" if "ratio" in given else "top_p")
    if not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"the share that a filter keeps lies in (0, 1], got {keep!r}")
    if keep == 1:
        return {"algo.filter": "none"}
    wanted = {
        "type": ("std", "largest"),
        "strategy": tuple(ours),
        "top_p_prob_mode": ("linear",),
        "metric": ("reward_variance",),
    }
    for key, values in wanted.items():
        if given.get(key, values[0]) not in values:
            raise ValueError(
                f"{_FILTER}{key}: groups are kept by the spread of their rewards; it is "
                f"{' or '.join(values)} here, got {given[key]!r}"
            )
    if given.get("include_zero"):
        note(f"{_FILTER}include_zero", "groups without a difference in reward are never kept")
    return {"algo.filter": ours[strategy], "algo.filter_keep": float(keep)}


def _mini_batches(facts: Tree, seen: Tree, note: Note) -> Tree:
    """RAGEN counts episodes per optimizer step, verl groups; verl-agent counts turns, whose
    number is unknown in advance."""
    key = next(
        name for name in ("ppo_mini_batch_size", f"{_ACTOR}.ppo_mini_batch_size") if name in facts
    )
    groups, size = (
        get_path(seen, f"rollout.train.{name}") or default_at(f"rollout.train.{name}")
        for name in ("env_groups", "group_size")
    )
    count = groups * size if key == "ppo_mini_batch_size" else groups
    per = facts[key]
    if not isinstance(per, int) or isinstance(per, bool) or per < 1:
        raise ValueError(f"must be a number of samples, 1 at least, got {per!r}")
    if "env.env_name" not in facts and count % per == 0:
        return {"train.mini_batches": count // per}
    note(key, "train.mini_batches is the number of optimizer steps per pass, 1 if not set")
    return {}


def _reward_manager(facts: Tree, seen: Tree, note: Note) -> Tree:
    if "env.env_name" not in facts and not facts.get("data.train_files"):
        raise ValueError(
            f"{REWARD} means nothing here: rewards come from the environment, or from data.reward "
            "= file.py:function"
        )
    if "env.env_name" in facts:
        note(REWARD, "rewards come from the environment", moot=True)
    return {}


def _pretraining(facts: Tree, seen: Tree, note: Note) -> Tree:
    used = facts.get("data_cfgs.ptx_datasets")
    if used and facts.get("train_cfgs.ptx_coeff"):
        raise ValueError("there is no pretraining loss beside the policy's")
    note("train_cfgs.ptx_coeff", "there is no pretraining loss, and no data for one is given")
    return {}


def _warmup(facts: Tree, seen: Tree, note: Note) -> Tree:
    steps = get_path(seen, "train.steps") or default_at("train.steps")
    key, ratio = next((key, value) for key, value in facts.items() if key in _WARMUP_RATIOS)
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"{key} is a share of the steps, got {ratio!r}")
    return {"train.warmup_steps": round(ratio * steps)}


def _penalty(facts: Tree, seen: Tree, note: Note) -> Tree:
    keys = (f"{_ACTOR}.use_invalid_action_penalty", f"{_ACTOR}.invalid_action_penalty_coef")
    if not flag(facts, keys[0]):
        return {"env.format.format_penalty": 0.0} if keys[0] in facts else {}
    coef = facts.get(keys[1], 0.1)
    if not isinstance(coef, int | float) or coef < 0:
        raise ValueError(f"{keys[1]} is 0 or more, got {coef!r}")
    return {"env.format.format_penalty": -float(coef)}


_WARMUP_RATIOS = ("train_cfgs.actor_lr_warmup_ratio", f"{_ACTOR}.optim.lr_warmup_steps_ratio")
COMBINATIONS: tuple[tuple[tuple[str, ...], Callable[[Tree, Tree, Note], Tree]], ...] = (
    (
        (
            "train_cfgs.bi_level_gae",
            "train_cfgs.advantage_estimator",
            "algorithm.bi_level_gae",
            "algorithm.adv_estimator",
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.filter_groups.enable",
            f"{_ACTOR}.policy_loss.loss_mode",
        ),
        _estimator,
    ),
    (("algorithm.gamma", "=algo.name"), _discount),
    (("agent.agent_length", "env_template"), _agents),
    (
        (
            "actor_rollout_ref.actor.use_kl_loss",
            "actor_rollout_ref.actor.kl_loss_coef",
            "algorithm.use_kl_in_reward",
            "algorithm.kl_ctrl.kl_coef",
        ),
        _kl,
    ),
    (("train_cfgs.bf16", "train_cfgs.fp16"), _precision),
    (("lora_cfgs.use_lora", "lora_cfgs.r"), _lora),
    (("agent_proxy.use_environment",), _environment_use),
    (
        ("agent_proxy.reward_normalization.grouping", "agent_proxy.reward_normalization.method"),
        _normalization,
    ),
    (("custom_envs", "=rollout.train.tags", "=rollout.val.tags"), _custom_envs),
    (("agent_proxy.use_turn_scores",), _turn_scores),
    (
        (
            "agent_proxy.context_window_mode",
            "agent_proxy.max_context_window",
            "env.history_length",
        ),
        _window,
    ),
    (("env.history_length", "=algo.name"), _shared_history),
    (("env.env_name", "?env.history_length"), _verl_agent),
    (tuple(f"{_FILTER}{key}" for key in FILTER_KEYS), _filter),
    (("ppo_mini_batch_size", f"{_ACTOR}.ppo_mini_batch_size", "?env.env_name"), _mini_batches),
    (
        (
            *FILES,
            *(
                f"data_cfgs.{part}_{name}"
                for part in ("train", "eval")
                for name in ("datasets", "data_files")
            ),
            f"?{REWARD}",
            "?env.env_name",
        ),
        files,
    ),
    ((REWARD, "?env.env_name", "?data.train_files"), _reward_manager),
    (
        (
            "trainer.total_epochs",
            *("?env.env_name", "?data.train_files", "?trainer.total_training_steps"),
        ),
        epochs,
    ),
    (
        (
            *(f"{key}.{name}" for key in BUFFERS for name in ("enable", "len", "penalty_factor")),
            "?reward_model.reward_kwargs.max_resp_len",
        ),
        overlong,
    ),
    (("trainer.nnodes", OVERRIDES, "?backend", *(f"?{key}" for key in PLACES)), nodes),
    (("train_cfgs.ptx_coeff", "data_cfgs.ptx_datasets", "data_cfgs.ptx_data_files"), _pretraining),
    (_WARMUP_RATIOS, _warmup),
    (("trainer.val_only", *RESUMES, "?trainer.default_local_dir"), purpose),
    (
        (
            *(f"{ROLLOUT}.do_sample", f"{VAL}.do_sample", f"{VAL}.temperature"),
            "?trainer.val_only",
        ),
        sampling,
    ),
    (("trainer.total_training_steps", "?trainer.val_only"), steps),
    (
        (f"{_ACTOR}.use_invalid_action_penalty", f"{_ACTOR}.invalid_action_penalty_coef"),
        _penalty,
    ),
)
"""(keys, function). A key that begins with "=" is ours: setting it in a layer calls the function
again. A key that begins with "?" is passed to the function but does not trigger it."""
