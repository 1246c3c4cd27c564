"""Every YAML block and command line that users brought from other projects, as they wrote it, and
its meaning here."""

import re
import shlex

import pytest

from turnwise.config import Config, ConfigError, ConfigWarning, load_config
from turnwise.config.dialects.keys import RULES
from turnwise.config.dialects.rules import Rule
from turnwise.config.dialects.translate import target_of
from turnwise.config.tree import default_at, known_fields
from turnwise.config.yaml_io import parse_yaml
from turnwise.envs.registry import make_env


def load(text: str, *overrides: str) -> Config:
    return load_config(parse_yaml(text), overrides)


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_multi_turn_parameters() -> None:
    config = load("""
train_cfgs:
  multi_turn: true              # Enable multi-turn training
  bi_level_gae: true           # Use bi-level GAE
  high_level_gamma: 0.95       # Turn-level discount factor
  max_turn: 3                  # Maximum turns per episode
  gamma: 1.0                   # Token-level discount factor
  gae_lambda: 1.0              # GAE lambda parameter
""")
    assert config.train.multi_turn
    assert config.algo.name == "bi_level_gae"
    assert (config.algo.high_level_gamma, config.algo.gamma, config.algo.lam) == (0.95, 1.0, 1.0)
    assert config.train.max_turn == 3


def test_environment_integration() -> None:
    config = load("""
agent_proxy:
  max_turn: 3                  # Max turns for agent proxy
  use_environment: true        # Enable environment interaction

env_cfgs:
  env_name: "frozen_lake"      # Environment name
  max_episode_length: 50       # Max episode length
""")
    assert config.train.max_turn == 3
    assert config.env.name == "frozen_lake"
    assert config.env.max_actions_per_episode == 50


def test_multi_turn_parameters_commented_in_chinese() -> None:
    config = load("""
train_cfgs:
  multi_turn: true              # 启用multi-turn模式
  bi_level_gae: true           # 启用双层GAE
  high_level_gamma: 0.95       # 高层折扣因子
  max_turn: 3                  # 最大轮数
""")
    assert (config.train.multi_turn, config.algo.name, config.train.max_turn) == (
        True,
        "bi_level_gae",
        3,
    )


def test_environment_state_manager() -> None:
    config = load("""
es_manager:
  train:
    env_groups: 2              # 环境组数
    group_size: 4              # 每组环境数量
    env_configs:
      tags: ["FrozenLake", "Sokoban"]
      n_groups: [1, 1]
""")
    groups = config.rollout.train
    assert (groups.env_groups, groups.group_size) == (2, 4)
    assert (groups.tags, groups.n_groups) == (("FrozenLake", "Sokoban"), (1, 1))


def test_agent_trainer_config() -> None:
    config = load("""
# Standard PPO config
trainer:
  total_epochs: 10
  
algorithm:
  adv_estimator: "gae"

# Agent-specific config  
agent:
  max_turn: 5
  agent_length: 4

env_template:
  - env_config_for_agent_0
  - env_config_for_agent_1
  # ... etc
""")
    assert config.train.steps == 10
    assert config.algo.name == "ppo"
    assert config.train.max_turn == 5
    groups = config.rollout.train
    assert groups.env_groups * groups.group_size == 4
    assert groups.tags == ("env_config_for_agent_0", "env_config_for_agent_1")
    assert groups.n_groups == (2, 2)


def test_verl_trainer_config() -> None:
    config = load("""
trainer:
  total_epochs: 10
  device: cuda
  project_name: my_project
  experiment_name: experiment_1
algorithm:
  gamma: 0.99
  lam: 0.95
  clip_ratio: 0.2
data:
  train_batch_size: 32
actor_rollout_ref:
  hybrid_engine: true
  rollout:
    n: 1
    temperature: 0.7
""")
    assert (config.train.steps, config.train.device) == (10, "cuda")
    assert (config.log.project, config.log.name) == ("my_project", "experiment_1")
    assert (config.algo.gamma, config.algo.lam) == (0.99, 0.95)
    assert (config.algo.clip_low, config.algo.clip_high) == (0.2, 0.2)
    assert (config.rollout.train.env_groups, config.rollout.train.group_size) == (32, 1)
    assert config.rollout.temperature == 0.7


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (
            "--train_cfgs.multi_turn true --train_cfgs.bi_level_gae true --train_cfgs.max_turn 3",
            {"multi_turn": True, "algo": "bi_level_gae", "max_turn": 3},
        ),
        (
            "--train_cfgs.multi_turn true --train_cfgs.bi_level_gae true --env_cfgs.env_name "
            '"your_environment"',
            {"multi_turn": True, "algo": "bi_level_gae", "env": "your_environment"},
        ),
        (
            "--multi_turn true --bi_level_gae true --max_turn 3 --learning_rate 5e-7",
            {"multi_turn": True, "algo": "bi_level_gae", "max_turn": 3, "lr": 5e-7},
        ),
    ],
)
def test_command_lines(line: str, settings: dict[str, object]) -> None:
    config = load_config(None, shlex.split(line))
    found = {
        "multi_turn": config.train.multi_turn,
        "algo": config.algo.name,
        "max_turn": config.train.max_turn,
        "env": config.env.name,
        "lr": config.train.lr,
    }
    assert {key: found[key] for key in settings} == settings


def test_dialects_mix_with_our_own_keys_and_overrides_win() -> None:
    config = load(
        "{train_cfgs: {max_turn: 3}, train: {lr: 0.1}, algo: {name: grpo}}", "--train.max_turn", "7"
    )
    assert (config.train.max_turn, config.train.lr, config.algo.name) == (7, 0.1, "grpo")
    assert load("train: {max_turn: 3}", "--agent_proxy.max_turn=8").train.max_turn == 8


def test_two_spellings_must_agree_within_a_layer() -> None:
    assert load("{train_cfgs: {max_turn: 3}, agent_proxy: {max_turn: 3}}").train.max_turn == 3
    text = refused("{train_cfgs: {max_turn: 3}, agent_proxy: {max_turn: 4}}")
    assert "agent_proxy.max_turn: 4 contradicts train_cfgs.max_turn = 3" in text
    assert "train.max_turn" in refused("{train_cfgs: {max_turn: 3}, train: {max_turn: 4}}")
    assert "learning_rate" in refused("", "--learning_rate=1e-3", "--train.lr=1e-4")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train_cfgs: {bi_level_gae: false}", "ppo"),
        ("{train_cfgs: {bi_level_gae: false}, algo: {name: grpo}}", "grpo"),
        ("{algorithm: {adv_estimator: gae, bi_level_gae: true}}", "bi_level_gae"),
        ("algorithm: {adv_estimator: reinforce_plus_plus}", "reinforce_pp"),
        ("algorithm: {adv_estimator: grpo}", "grpo"),
    ],
)
def test_estimators(text: str, name: str) -> None:
    assert load(text).algo.name == name


def test_estimators_over_layers() -> None:
    assert (
        load("train_cfgs: {bi_level_gae: true}", "algorithm.adv_estimator=gae").algo.name
        == "bi_level_gae"
    )
    assert "contradicts" in refused(
        "train_cfgs: {bi_level_gae: true}", "algorithm.adv_estimator=grpo"
    )
    assert "remax" in refused("algorithm: {adv_estimator: remax}")
    assert "true or false" in refused("train_cfgs: {bi_level_gae: 3}")


def test_env_template_takes_settings_too() -> None:
    config = load("""
agent: {agent_length: 6}
actor_rollout_ref: {rollout: {n: 2}}
env_template:
  - {env_name: frozen_lake, max_episode_length: 9, options: {size: 3}}
  - {name: bandit, tag: arms}
""")
    assert config.rollout.train.tags == ("agent_0", "arms")
    assert config.rollout.train.n_groups == (2, 1)
    assert config.rollout.train.group_size == 2
    assert config.envs["agent_0"].max_actions_per_episode == 9
    assert config.envs["agent_0"].options == {"size": 3}
    assert config.envs["arms"].name == "bandit"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{agent: {agent_length: 1}, env_template: [a, b]}", "2 entries"),
        ("{agent: {agent_length: 3}, rollout: {train: {group_size: 2}}}", "do not divide"),
        ("env_template: frozen_lake", "a list"),
        (
            "env_template: [{nam: frozen_lake}]",
            "envs.agent_0.nam: unknown key. Did you mean envs.agent_0.name?",
        ),
        ("agent: {agent_length: 0}", "1 at least"),
        ("{agent: {agent_length: 4}, data: {train_batch_size: 8}}", "contradicts"),
    ],
)
def test_agents_that_make_no_sense(text: str, reason: str) -> None:
    assert reason in refused(text)


def test_settings_for_every_environment_reach_every_tag() -> None:
    config = load("""
agent_proxy: {action_sep: ",", enable_think: false, max_actions_per_turn: 2}
es_manager: {format_penalty: -0.5, train: {env_groups: 2, env_configs: {tags: [FrozenLake, Sokoban]}}}
envs: {Sokoban: {name: sokoban, format: {action_sep: ";"}}}
""")
    for env in (config.env, config.envs["FrozenLake"], config.envs["Sokoban"]):
        assert env.format.max_actions_per_turn == 2
        assert env.format.format_penalty == -0.5
        assert not env.format.think
    assert config.envs["FrozenLake"].format.action_sep == ","
    assert config.envs["FrozenLake"].name == "FrozenLake"
    assert config.envs["Sokoban"].format.action_sep == ";"


def test_custom_envs() -> None:
    config = load("""
custom_envs:
  Lake: {env_type: frozen_lake, max_actions_per_traj: 10, env_instruction: "Go.", env_config: {size: 4}}
""")
    lake = config.envs["Lake"]
    assert (lake.name, lake.max_actions_per_episode, lake.system_prompt) == (
        "frozen_lake",
        10,
        "Go.",
    )
    assert lake.options == {"size": 4, "p": 0.9, "success_rate": 0.8, "random_goal": True}
    assert "keep one" in refused("{custom_envs: {Lake: {env_type: a}}, envs: {Lake: {name: b}}}")
    assert "Lake.max_token means nothing here" in refused(
        "{custom_envs: {Lake: {max_token: 100}}, rollout: {train: {tags: [Lake]}}}"
    )


def test_no_environment_needs_prompts() -> None:
    assert "data.prompts" in refused("agent_proxy: {use_environment: false}")
    config = load("{agent_proxy: {use_environment: false}, data: {prompts: p.jsonl}}")
    assert not config.train.multi_turn
    assert "contradicts" in refused(
        "{agent_proxy: {use_environment: false}, data: {prompts: p.jsonl}, train_cfgs: "
        "{multi_turn: true}}"
    )


def test_kl() -> None:
    config = load(
        "actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.01, kl_loss_type: "
        "low_var_kl}}"
    )
    assert (config.algo.kl_coef, config.algo.kl_in, config.algo.kl_form) == (0.01, "loss", "k3")
    assert (
        load("algorithm: {use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.1}}").algo.kl_in == "reward"
    )
    assert (
        load("actor_rollout_ref: {actor: {use_kl_loss: false, kl_loss_coef: 0.01}}").algo.kl_coef
        == 0.0
    )
    assert "use_kl_loss" in refused("actor_rollout_ref: {actor: {kl_loss_coef: 0.01}}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("actor_rollout_ref: {rollout: {layered_summon: true}}", "a key of verl"),
        ("trainer: {nnodes: two}", "a number of machines, got 'two'"),
        ("actor_rollout_ref: {model: {override_config: {a: 1}}}", "set backend: verl"),
        ("actor_rollout_ref: {hybrid_engine: false}", "trainer's own weights"),
        ("data: {train_files: a.parquet}", "set data.prompts = FILE"),
        ("data_cfgs: {train_datasets: PKU/data}", "set data.prompts = FILE"),
        ("{data: {train_files: a.parquet}, reward_model: {reward_manager: prime}}", "data.reward"),
        ("{data: {train_files: [a, b]}, reward_model: {reward_manager: dapo}}", "from one file"),
        ("reward_model: {reward_manager: dapo}", "rewards come from the environment"),
        ("reward_model: {overlong_buffer: {enable: true, len: 4}}", "needs len and penalty_factor"),
        ("reward_model: {overlong_buffer: {penalty_factor: 1.0}}", "needs enable, len and"),
        ("train_cfgs: {ptx_coeff: 16.0}\ndata_cfgs: {ptx_datasets: a}", "no pretraining loss"),
        ("trainer: {resume_from_path: a/b}", "turnwise train --resume RUN"),
        ("trainer: {resume_mode: resume_path}", "turnwise train --resume RUN"),
        ("trainer: {total_training_steps: 0}", "0 trains nothing"),
        ("actor_rollout_ref: {rollout: {do_sample: false}}", "samples at rollout.temperature"),
        ("algorithm: {adv_estimator: opo}", "is not a known estimator"),
        ("algorithm: {hgpo: {weight_type: size}}", "weighed by their history"),
        ("env: {env_name: gym_cards/Blackjack-v0}", "has no environment 'gym_cards'"),
        ("env: {sokoban: {mode: rgb_array}}", "text, not images"),
        ("algorithm: {gigpo: {enable_similarity: true}}", "state_key"),
        ("data: {shuffle_seed: 3}", "data of verl means nothing to backend 'native'"),
    ],
)
def test_a_key_that_means_nothing_here_says_why(text: str, reason: str) -> None:
    assert reason in refused(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("actor_rollout_ref: {rollout: {gpu_memory_utilization: 0.3}}", "without an effect"),
        ("train_cfgs: {ds_cfgs: ds_z3_config.json}", "without an effect here: train_cfgs.ds_cfgs"),
        ("train_cfgs: {per_device_train_batch_size: 8}", "per_device_train_batch_size"),
        ("per_device_train_batch_size: 8", "per_device_train_batch_size"),
        ("agent_proxy: {use_turn_scores: false}", "not on the episode's last"),
        ("seed: {train: 1, val: 2}", "disjoint"),
        ("{env: {env_name: Webshop}, data: {train_files: a.parquet}}", "from the environment"),
        ("algorithm: {adv_estimator: grpo, gamma: 0.9}", "grpo discounts nothing"),
        ("trainer: {val_only: true}", "trainer.val_only: `turnwise eval FILE` evaluates"),
        ("env: {env_name: Webshop}", "env.history_length: verl-agent shows the last 2 turns"),
    ],
)
def test_a_key_that_is_taken_without_its_effect_is_said(text: str, reason: str) -> None:
    with pytest.warns(ConfigWarning, match=re.escape(reason)):
        load(text)


def test_null_is_not_set_where_ours_has_no_null() -> None:
    config = load(
        "{data: {train_batch_size: null}, es_manager: {train: {env_groups: 3}}, "
        "logger_cfgs: {output_dir: null}, train_cfgs: {clip_range_value: null}}"
    )
    assert (config.rollout.train.env_groups, config.log.dir) == (3, "runs")
    assert config.algo.value_clip is None


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("agent_proxy: {max_context_window: -1}", {"window": "full"}),
        ("agent_proxy: {max_context_window: 4}", {"window": "last_k", "window_turns": 4}),
        (
            "agent_proxy: {context_window_mode: full, max_context_window: 4}",
            {"window": "full", "window_turns": 3},
        ),
        ("agent_proxy: {context_window_mode: single_turn}", {"window": "single_turn"}),
        ("env: {history_length: 2}", {"window": "last_k", "window_turns": 2}),
        ("env: {history_length: 0}", {"window": "single_turn"}),
    ],
)
@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
def test_windows(text: str, settings: dict[str, object]) -> None:
    found = load(text).rollout.model_dump()
    assert {key: found[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("ratio: 0.25, rollout_filter_type: std", ("variance_top_k", 0.25)),
        ("value: 0.9, rollout_filter_strategy: top_p", ("variance_top_p", 0.9)),
        ("value: 0.5, rollout_filter_strategy: top_k", ("variance_top_k", 0.5)),
        ("value: 1.0, rollout_filter_type: smallest", ("none", 1.0)),
    ],
)
def test_group_filters(keys: str, found: tuple[str, float]) -> None:
    algo = load(f"actor_rollout_ref: {{rollout: {{rollout_filter_{keys}}}}}").algo
    assert (algo.filter, algo.filter_keep) == found


def test_a_group_filter_by_something_else_is_refused() -> None:
    text = "actor_rollout_ref: {rollout: {rollout_filter_value: 0.5, rollout_filter_%s}}"
    assert "spread of their rewards" in refused(text % "metric: entropy")
    assert "got 'max_mean'" in refused(text % "type: max_mean")
    assert "lies in (0, 1]" in refused("actor_rollout_ref: {rollout: {rollout_filter_value: 2}}")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("{ppo_mini_batch_size: 32, rollout: {train: {env_groups: 8, group_size: 16}}}", 4),
        ("{actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}, rollout: {n: 5}}, "
         "data: {train_batch_size: 8}}", 2),
        ("{ppo_mini_batch_size: 48, rollout: {train: {env_groups: 8, group_size: 16}}}", 1),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
def test_mini_batches_are_counted(text: str, count: int) -> None:
    assert load(text).train.mini_batches == count


@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
def test_verl_agent() -> None:
    config = load("""
algorithm: {adv_estimator: gigpo, gamma: 0.9, gigpo: {mode: mean_norm, step_advantage_w: 0.5}}
actor_rollout_ref: {actor: {use_invalid_action_penalty: true, invalid_action_penalty_coef: 0.2}}
env: {env_name: alfworld/AlfredTWEnv, seed: 4, max_steps: 50, rollout: {n: 8}}
""")
    assert (config.env.name, config.env.max_turn, config.seed) == ("alfworld", 50, 4)
    assert config.rollout.train.group_size == 8
    assert (config.algo.name, config.algo.high_level_gamma) == ("gigpo", 0.9)
    assert (config.algo.gigpo_std, config.algo.gigpo_weight) == (False, 0.5)
    assert config.env.format.format_penalty == -0.2


def test_an_evaluation_is_read() -> None:
    text = """
trainer: {val_only: true, total_training_steps: 0, val_before_train: false,
  resume_mode: resume_path, resume_from_path: /weights/global_step_200}
actor_rollout_ref: {rollout: {do_sample: false}}
"""
    with pytest.warns(ConfigWarning) as caught:
        config = load(text)
    told = str(caught[0].message)
    assert "trainer.val_only: `turnwise eval FILE` evaluates" in told
    assert "trainer.resume_from_path: the weights to evaluate: set model.path" in told
    assert "without an effect here: trainer.total_training_steps" in told
    assert config.rollout.eval_temperature == 0.0
    assert config.train.steps == default_at("train.steps")


@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
@pytest.mark.parametrize(
    ("rollout", "temperature"),
    [
        ("{do_sample: false, val_kwargs: {do_sample: true, temperature: 0.5}}", 0.5),
        ("{do_sample: false, val_kwargs: {temperature: 0.5}}", 0.0),
        ("{do_sample: true, val_kwargs: {do_sample: false, temperature: 0.5}}", 0.0),
        ("{do_sample: true, val_kwargs: {temperature: 0.5}}", 0.5),
    ],
)
def test_an_evaluation_samples_as_val_kwargs_say(rollout: str, temperature: float) -> None:
    text = f"{{trainer: {{val_only: true}}, actor_rollout_ref: {{rollout: {rollout}}}}}"
    assert load(text).rollout.eval_temperature == temperature
    assert load(text, "rollout.eval_temperature=0.7").rollout.eval_temperature == 0.7


@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
def test_verl_agents_hgpo() -> None:
    text = """
algorithm: {adv_estimator: hgpo, gamma: 0.9, hgpo: {mode: mean_norm, weight_type: length,
  length_weight_alpha: 0.5, base_group: true}}
env: {env_name: Webshop, history_length: 4}
"""
    algo = load(text).algo
    assert (algo.name, algo.high_level_gamma, algo.hgpo_history) == ("hgpo", 0.9, 4)
    assert (algo.hgpo_std, algo.hgpo_alpha, algo.hgpo_episode) == (False, 0.5, True)
    assert load(text, "env.history_length=1").algo.hgpo_history == 1
    assert load("env: {history_length: 4}").algo.hgpo_history == 2  # of another algorithm


def test_estimators_with_their_refinements() -> None:
    actor = "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}}}"
    assert load(f"{{algorithm: {{adv_estimator: grpo}}, {actor}}}").algo.name == "gspo"
    assert "needs algorithm.adv_estimator" in refused(actor)
    dr = "algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}"
    assert load(dr).algo.name == "dr_grpo"
    dapo = load("algorithm: {adv_estimator: grpo, filter_groups: {enable: true}}").algo
    assert (dapo.name, dapo.filter) == ("grpo", "dynamic")


@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
def test_custom_environments_open_with_ragens_options() -> None:
    config = load("""
custom_envs:
  Arms: {env_type: bandit, env_instruction: "", env_config: {lo_arm_name: A, hi_arm_name: B}}
  Room: {env_type: sokoban, env_config: {dim_x: 5, dim_y: 6, num_boxes: 1, search_depth: 30,
    observation_format: grid_coord, grid_lookup: {0: W, 5: "@"}}, max_tokens: 9}
  Sums: {env_type: countdown, env_config: null, parallel_friendly: false, max_workers: 3}
  Proof: {env_type: lean}
es_manager: {train: {env_groups: 3, env_configs: {tags: [Arms, Room, Sums]}}}
""")
    assert set(config.envs) == {"Arms", "Room", "Sums"}
    assert config.envs["Arms"].options == {"low": 0.1, "arms": ["A", "B"]}
    assert config.envs["Arms"].system_prompt is None
    assert config.envs["Sums"].options == {"operators": "+-"}
    shown = {}
    for tag, settings in config.envs.items():
        env = make_env(settings)
        shown[tag] = env.reset(env.make_task(3, "train"), noise_seed=0).messages[-1].content
        env.close()
    assert "A" in shown["Arms"]
    assert "B" in shown["Arms"]
    assert "WWWWWW" in shown["Room"]
    assert "@" in shown["Room"]


def test_ragens_puzzles_open_with_their_options() -> None:
    text = """
custom_envs:
  Grid: {env_type: sudoku, env_config: {grid_size: 4, difficulty: hard, show_conflicts: true,
    render_format: with_feedback, show_valid_numbers: false, max_steps: 20}}
  Tiles: {env_type: game_2048, env_config: null}
  Cube: {env_type: rubikscube, env_config: {scramble_depth: 1, max_steps: 20, render_mode: text}}
rollout: {train: {env_groups: 3, tags: [Grid, Tiles, Cube]}}
"""
    with pytest.warns(ConfigWarning, match="show_conflicts: a number that breaks a rule"):
        config = load(text)
    for tag, shown in (("Grid", "9 cells are empty"), ("Tiles", "Score: 0"), ("Cube", "Front")):
        env = make_env(config.envs[tag])
        assert shown in env.reset(env.make_task(3, "train")).messages[-1].content
    wrong = "custom_envs: {Cube: {env_type: rubikscube, env_config: {action_lookup: {1: U}}}}"
    assert "actions have names" in refused(wrong, "rollout.train.tags=[Cube]")


def test_a_tag_named_later_brings_its_environment() -> None:
    text = "custom_envs: {Proof: {env_type: lean}, Arms: {env_type: bandit}}"
    with pytest.warns(ConfigWarning, match="custom_envs.Proof: it is left out"):
        assert set(load(text).envs) == {"Arms"}
    with pytest.raises(ConfigError, match="has no environment 'lean'"):
        load(text, "rollout.train.tags=[Proof]")


DAPO = """
data: {train_files: /d/train.parquet, val_files: [/d/test.parquet], prompt_key: prompt,
  max_response_length: 1000, train_batch_size: 8}
actor_rollout_ref: {rollout: {n: 4, tensor_model_parallel_size: 2}}
algorithm: {adv_estimator: grpo, filter_groups: {enable: true, metric: acc}}
reward_model: {reward_manager: dapo, BUFFER: {enable: true, len: 200, penalty_factor: 0.5}}
trainer: {total_epochs: 3, nnodes: 1, n_gpus_per_node: 8}
"""
BUFFER = "reward_kwargs: {max_resp_len: 1000, overlong_buffer_cfg: {enable: true, len: 200, penalty_factor: 0.5, log: false}}"


@pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")
def test_verls_data_files_are_prompts_with_answers() -> None:
    config = load(DAPO.replace("BUFFER", "overlong_buffer"))
    assert (config.data.prompts, config.data.val_prompts) == (
        "/d/train.parquet",
        "/d/test.parquet",
    )
    assert (config.data.reward, config.data.answer_column) == ("exact", "reward_model.ground_truth")
    assert (config.data.epochs, config.train.multi_turn) == (3, False)
    shaping = config.env.shaping
    assert (shaping.overlong_tokens, shaping.overlong_penalty) == (200, 0.5)
    assert (config.backend, config.verl, config.algo.filter) == ("native", {}, "dynamic")
    off = load(DAPO.replace("BUFFER: {enable: true", "overlong_buffer: {enable: false"))
    assert off.env.shaping.overlong_tokens == 0
    steps = load(DAPO.replace("BUFFER", "overlong_buffer"), "trainer.total_training_steps=9")
    assert (steps.train.steps, steps.data.epochs) == (9, None)
    start, _, rest = DAPO.partition("BUFFER: {")
    other = load(start + BUFFER + rest.partition("}")[2])
    assert other.env.shaping == shaping
    wrong = start + BUFFER.replace("1000", "900") + rest.partition("}")[2]
    assert "max_resp_len must be data.max_response_length" in refused(wrong)
    named = load(DAPO.replace("BUFFER", "overlong_buffer"), "data.prompts=mine.jsonl")
    assert named.data.prompts == "mine.jsonl"


def test_several_nodes_are_verls() -> None:
    text = DAPO.replace("BUFFER", "overlong_buffer").replace("nnodes: 1", "nnodes: 16")
    with pytest.warns(ConfigWarning, match="started with --nodes 16 --gpus 8"):
        config = load(text, "actor_rollout_ref.model.override_config.max_position_embeddings=32768")
    assert config.backend == "verl"
    assert config.verl == {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.model.override_config.max_position_embeddings": 32768,
    }
    with pytest.warns(ConfigWarning, match="the native trainer runs on one device"):
        assert load(text, "backend=native").backend == "native"


def test_verl_keys_pass_through_with_backend_verl() -> None:
    config = load("""
backend: verl
trainer: {nnodes: 2, total_epochs: 3}
actor_rollout_ref: {hybrid_engine: true, rollout: {gpu_memory_utilization: 0.3, n: 4}}
""")
    assert config.verl == {
        "trainer.nnodes": 2,
        "actor_rollout_ref.hybrid_engine": True,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    }
    assert (config.train.steps, config.rollout.train.group_size) == (3, 4)
    assert load("trainer: {nnodes: 2}", "backend=verl").verl == {"trainer.nnodes": 2}


def test_every_rule_leads_to_a_setting_that_exists() -> None:
    for key, rule in RULES.items():
        targets = rule.to if isinstance(rule, Rule) else (target_of(key),)
        for target in targets:
            assert (
                target is None or target in known_fields() or target.startswith("env.options.")
            ), key


def test_precision_and_lora() -> None:
    assert load("train_cfgs: {bf16: true, fp16: false}").model.dtype == "bfloat16"
    assert load("train_cfgs: {bf16: false}").model.dtype == "float32"
    assert load("lora_cfgs: {use_lora: true, r: 8}").model.lora.rank == 8
    assert load("lora_cfgs: {use_lora: false, r: 8}").model.lora.rank == 0
    assert load("lora: {rank: 4}").model.lora.rank == 4
    assert "lora_cfgs.r" in refused("lora_cfgs: {use_lora: true}")
