"""Keys of other projects that mean something only together, such as `adv_estimator` and `bi_level_gae`.

Each function takes the facts (key as written -> value) and the tree so far, and returns settings under our names.
It raises ValueError with the reason where the facts contradict each other or mean nothing here.
"""

from collections.abc import Callable
from typing import Any, cast

from turnwise.config.dialects.keys import ESTIMATORS
from turnwise.config.tree import Tree, default_at, get_path, is_tree


def _flag(facts: Tree, key: str) -> bool | None:
    value = facts.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {key} = {value!r}")
    return value


def _estimator(facts: Tree, seen: Tree) -> Tree:
    flags = [_flag(facts, key) for key in ("train_cfgs.bi_level_gae", "algorithm.bi_level_gae")]
    if True in flags and False in flags:
        raise ValueError("train_cfgs.bi_level_gae and algorithm.bi_level_gae contradict each other; keep one")
    bi_level = True if True in flags else False if False in flags else None
    given = facts.get("algorithm.adv_estimator")
    if given is None:
        if bi_level:
            return {"algo.name": "bi_level_gae"}
        current = get_path(seen, "algo.name") or default_at("algo.name")
        return {"algo.name": "ppo"} if current == "bi_level_gae" else {}
    if not isinstance(given, str) or given not in ESTIMATORS:
        raise ValueError(f"{given!r} is no estimator here: algorithm.adv_estimator is one of {', '.join(ESTIMATORS)}")
    name = ESTIMATORS[given]
    if bi_level and name not in ("ppo", "bi_level_gae"):
        raise ValueError(f"adv_estimator {given!r} contradicts bi_level_gae: true, which refines gae; keep one")
    if bi_level is False and name == "bi_level_gae":
        raise ValueError("adv_estimator bi_level_gae contradicts bi_level_gae: false; keep one")
    return {"algo.name": "bi_level_gae" if bi_level else name}


def _agents(facts: Tree, seen: Tree) -> Tree:
    """agent_length agents play one episode each; agent i plays the (i mod n)-th of the n templates."""
    template = facts.get("env_template")
    if template is not None and not (isinstance(template, list | tuple) and template):
        raise ValueError(f"env_template is a list with one environment per agent, got {template!r}")
    templates = cast("list[Any]", template or [])
    agents = facts.get("agent.agent_length", len(templates))
    if not isinstance(agents, int) or isinstance(agents, bool) or agents < 1:
        raise ValueError(f"agent.agent_length is the number of agents, 1 at least, got {agents!r}")
    if len(templates) > agents:
        raise ValueError(f"env_template has {len(templates)} entries for agent.agent_length = {agents} agents")
    size = get_path(seen, "rollout.train.group_size") or 1
    if not isinstance(size, int) or agents % size:
        raise ValueError(f"{agents} agents do not divide into groups of rollout.train.group_size = {size}")
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
            f"env_template has {len(templates)} entries for {groups} groups; a group shares one environment"
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
        raise ValueError(f"an entry of env_template is an environment's name or its settings, got {item!r}")
    known = {"env_name": "name", "max_episode_length": "max_actions_per_episode"}
    env: Tree = {known.get(str(key), str(key)): value for key, value in item.items()}
    tag = env.pop("tag", None) or f"agent_{index}"
    return str(tag), env


def _kl(facts: Tree, seen: Tree) -> Tree:
    pairs = (
        ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef", "loss"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "reward"),
    )
    on = [pair for pair in pairs if _flag(facts, pair[0])]
    if len(on) == 2:
        raise ValueError("a KL in the loss and one in the reward at once mean nothing here; keep one")
    if on:
        switch, coef, where = on[0]
        if coef not in facts:
            raise ValueError(f"{switch} needs its weight: set {coef}")
        return {"algo.kl_coef": facts[coef], "algo.kl_in": where}
    for switch, coef, _ in pairs:
        if coef in facts and switch not in facts:
            raise ValueError(f"{coef} counts only with {switch}; set that too, or use algo.kl_coef")
    return {"algo.kl_coef": 0.0}


def _precision(facts: Tree, seen: Tree) -> Tree:
    names = {"train_cfgs.bf16": "bfloat16", "train_cfgs.fp16": "float16"}
    on = [name for key, name in names.items() if _flag(facts, key)]
    if len(on) == 2:
        raise ValueError("bf16 and fp16 exclude each other; keep one")
    return {"model.dtype": on[0] if on else "float32"}


def _lora(facts: Tree, seen: Tree) -> Tree:
    used = _flag(facts, "lora_cfgs.use_lora")
    if used is None:
        raise ValueError("lora_cfgs.r counts only with lora_cfgs.use_lora; set that too, or use model.lora.rank")
    if not used:
        return {"model.lora.rank": 0}
    if "lora_cfgs.r" not in facts:
        raise ValueError("lora_cfgs.use_lora needs the rank: set lora_cfgs.r")
    return {"model.lora.rank": facts["lora_cfgs.r"]}


def _environment_use(facts: Tree, seen: Tree) -> Tree:
    if _flag(facts, "agent_proxy.use_environment"):
        return {}
    if get_path(seen, "data.prompts") is None:
        raise ValueError("without an environment there must be prompts: set data.prompts and data.reward")
    return {"train.multi_turn": False}


def _normalization(facts: Tree, seen: Tree) -> Tree:
    prefix = "agent_proxy.reward_normalization"
    method = facts.get(f"{prefix}.method", "identity")
    grouping = facts.get(f"{prefix}.grouping", "batch")
    if method == "identity":
        return {"env.shaping.normalize": "none"}
    if method not in ("mean", "mean_std") or grouping not in ("state", "batch"):
        raise ValueError(
            f"method {method!r} with grouping {grouping!r} means nothing here: methods are identity, mean and "
            "mean_std, groupings state and batch"
        )
    return {"env.shaping.normalize": grouping, "env.shaping.normalize_std": method == "mean_std"}


def _custom_envs(facts: Tree, seen: Tree) -> Tree:
    names = {
        "env_type": "name",
        "max_actions_per_traj": "max_actions_per_episode",
        "env_instruction": "system_prompt",
        "env_config": "options",
    }
    settings: Tree = {}
    custom = facts["custom_envs"]
    if not is_tree(custom) or not all(is_tree(keys) for keys in custom.values()):
        raise ValueError(f"custom_envs holds the settings of environments by tag, got {custom!r}")
    for tag, keys in cast(Tree, custom).items():
        for key, value in cast(Tree, keys).items():
            if key not in names:
                raise ValueError(f"{tag}.{key} means nothing here; an environment's keys are {', '.join(names)}")
            env: Tree = settings.setdefault(tag, {})
            env[names[key]] = value
    return {"envs": settings}


COMBINATIONS: tuple[tuple[tuple[str, ...], Callable[[Tree, Tree], Tree]], ...] = (
    (("train_cfgs.bi_level_gae", "algorithm.bi_level_gae", "algorithm.adv_estimator"), _estimator),
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
    (("agent_proxy.reward_normalization.grouping", "agent_proxy.reward_normalization.method"), _normalization),
    (("custom_envs",), _custom_envs),
)
