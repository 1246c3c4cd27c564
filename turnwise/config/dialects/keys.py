"""The key names of other projects in one table: what they are called here, or why they mean nothing
here. Reading, migrating and error messages all use it."""

from turnwise.config.dialects.align_anything import ALIGN_ANYTHING
from turnwise.config.dialects.ragen import RAGEN
from turnwise.config.dialects.rules import AnyRule, Moot, Rule, trackers
from turnwise.config.dialects.verl import VERL, VERL_AGENT, VERL_NATIVE

# Attributes of ConfigStore (store.py).
_CONFIG_STORE: dict[str, AnyRule] = {
    "training.num_epochs": "train.steps",
    "training.learning_rate": "train.lr",
    "training.batch_size": "rollout.train.env_groups",
    "training.group_size": "rollout.train.group_size",
    "training.max_turns": "train.max_turn",
    "training.device": "train.device",
    "training.seed": "seed",
    "trainer.epochs": "train.steps",
    "trainer.logging": Rule(to=("log.trackers",), convert=trackers),
    "environment.name": "env.name",
    "environment.max_turns": "env.max_turn",
    "environment.max_steps": "env.max_actions_per_episode",
    "environment.options": "env.options",
    "environment.size": "env.options.size",
    "environment.system_prompt": "env.system_prompt",
    "model.model_name": "model.path",
    "data.batch_size": "rollout.train.env_groups",
    "data.num_workers": "rollout.num_workers",
}

_HYDRA: dict[str, AnyRule] = {"hydra": Moot(why="it says where Hydra looks, and what it writes")}
_FOR_ALL = ALIGN_ANYTHING | VERL | _CONFIG_STORE
RULES: dict[str, AnyRule] = RAGEN | VERL_NATIVE | VERL_AGENT | _HYDRA | _FOR_ALL

# Sections in which short flags (`--max_turn 3`) are looked up, in this order.
SHORT_FLAG_SECTIONS = ("train_cfgs", "env_cfgs", "model_cfgs")

# Other keys under these belong to verl: passed on with backend verl, refused otherwise.
VERL_ROOTS = frozenset(
    {
        "actor_rollout_ref",
        "critic",
        "trainer",
        "algorithm",
        "data",
        "reward",
        "reward_model",
        "ray_kwargs",
    }
    | {"transfer_queue", "custom_reward_function", "global_profiler"}
)

# Of those, what backend verl is given as it is, though the native backend has a rule for it.
PASSED_ON = frozenset(
    key for key in RULES if key.partition(".")[0] in VERL_ROOTS and key not in _FOR_ALL
)

# verl's and RAGEN's names of estimators.
ESTIMATORS: dict[str, str] = {
    "gae": "ppo",
    "ppo": "ppo",
    "bi_level_gae": "bi_level_gae",
    "turn_gae": "turn_gae",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_pp": "reinforce_pp",
    "gigpo": "gigpo",
    "hgpo": "hgpo",
}
