"""Files of other projects: Hydra's defaults and references, shell scripts, `turnwise migrate`."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli.main import main
from turnwise.config import ConfigError, ConfigWarning, load_config
from turnwise.config.dialects.hydra import compose
from turnwise.config.dialects.shell import read_script
from turnwise.config.load import _parsed_file, parse_overrides
from turnwise.config.migrate import migrate
from turnwise.config.yaml_io import parse_yaml

pytestmark = pytest.mark.filterwarnings("ignore::turnwise.config.ConfigWarning")

FILES = {
    "main.yaml": """
defaults: [base, _self_, {env: lake}, {optional model: absent}, extra/more]
hydra: {searchpath: [pkg://nowhere]}
name: ${base_name}-main
deep: {a: {x: 2}, list: [3]}
""",
    "base.yaml": """
defaults: [root]
base_name: one
deep: {a: {x: 1, y: "${base_name}"}, list: [1, 2], none: null}
env: {size: 9, kept: true}
""",
    "root.yaml": "base_name: zero\nfrom_root: ${deep.a.x}\n",
    "env/lake.yaml": "size: 4\n",
    "extra/more.yaml": "# @package _global_\nadded: [1]\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / next(iter(files))


def test_defaults_and_references_are_those_of_hydra(tmp_path: Path) -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    path = write(tmp_path, {**FILES, "main.yaml": FILES["main.yaml"].replace("hydra", "unused")})
    ours = compose(path, _parsed_file)
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        theirs: Any = OmegaConf.to_container(hydra.compose("main"), resolve=True)
    assert ours == theirs
    assert (ours["name"], ours["from_root"], ours["env"]) == (
        "one-main",
        2,
        {"size": 4, "kept": True},
    )


BOMB = "defaults: []\nx0: aaaaaaaaaa\n" + "".join(
    f"x{n}: ${{x{n - 1}}}${{x{n - 1}}}\n" for n in range(1, 60)
)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.yaml": "defaults: [b]"}, "there is no"),
        ({"a.yaml": "defaults: [b]", "b.yaml": "defaults: [a]"}, "names itself"),
        ({"a.yaml": "defaults: ['b@c']"}, "more of Hydra than is read here"),
        ({"a.yaml": "defaults: [{override b: c}]"}, "more of Hydra than is read here"),
        ({"a.yaml": "defaults: [[b]]"}, "more of Hydra than is read here"),
        ({"a.yaml": "defaults: []\nseed: ${gone}"}, "gone"),
        ({"a.yaml": "defaults: []\nseed: ${a}\na: ${seed}"}, "ecursi"),
        ({"a.yaml": "defaults: []\nseed: ${now:%H}"}, "more than a key"),
        ({"a.yaml": "defaults: []\nseed: ${a.${b}}"}, "more than a key"),
        ({"a.yaml": BOMB}, "stands for more than"),
        ({"a.yaml": "defaults: [b]", "b.yaml": "[1]"}, "must hold keys and values"),
        ({"a.yaml": "defaults: [../../etc/passwd]"}, "there is no"),
    ],
)
def test_what_cannot_be_composed_is_said(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(write(tmp_path, files))


def test_references_without_omegaconf_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "omegaconf", None)
    with pytest.raises(ConfigError, match=r"turnwise\[hydra\]"):
        load_config(write(tmp_path, {"a.yaml": "model_path: ${b}\nb: 1\n"}))


RAGEN = {
    "_room.yaml": """
defaults: [base]
trainer: {experiment_name: 7}
es_manager: {train: {env_configs: {tags: [Room]}}, val: {env_configs: {tags: [Room]}}}
""",
    "base.yaml": """
defaults: [ppo_trainer, envs]
seed: {train: 10000, val: 123}
ppo_mini_batch_size: 8
model_path: org/model
actor_rollout_ref:
  model: {path: "${model_path}"}
  actor: {ppo_mini_batch_size: "${ppo_mini_batch_size}", use_kl_loss: false, kl_loss_coef: 0.0}
  rollout: {response_length: 90, gpu_memory_utilization: 0.5, rollout_filter_ratio: 0.25}
critic: {model: {path: "${model_path}"}}
data: {train_batch_size: null}
algorithm: {adv_estimator: gae, bi_level_gae: false, kl_ctrl: {kl_coef: 0.0}}
agent_proxy: {use_turn_scores: false, max_context_window: -1}
es_manager:
  train: {env_groups: 2, group_size: 8, env_configs: {tags: [Arms], n_groups: [2]}}
  val: {env_groups: 32, group_size: 1, env_configs: {tags: [Arms], n_groups: [32]}}
ctx_manager:
  generation:
    gen_config:
      response_length: ${actor_rollout_ref.rollout.response_length}
      top_p: ${actor_rollout_ref.rollout.top_p}
      top_k: ${actor_rollout_ref.rollout.top_k}
      kwargs: null
""",
    "envs.yaml": """
custom_envs:
  Arms: {env_type: bandit, max_actions_per_traj: 1, env_instruction: "", env_config: null}
  Room:
    env_type: sokoban
    max_actions_per_traj: 10
    env_instruction: "Push the boxes: answer <answer>Up</answer>.\\nNo \\"walls\\" # here."
    env_config: {dim_x: 6, dim_y: 6, num_boxes: 1}
  Picture: {env_type: sokoban, env_config: {render_mode: rgb_array}}
""",
}


def test_a_file_in_ragens_form_is_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RAGEN), ["model_path=org/other"])
    assert (config.model.path, config.log.name, config.seed) == ("org/other", "7", 10000)
    assert (config.algo.name, config.algo.filter, config.algo.filter_keep) == (
        "ppo",
        "variance_top_k",
        0.25,
    )
    assert (config.rollout.max_response_tokens, config.rollout.top_p) == (90, 1.0)
    assert (config.train.mini_batches, config.train.lr, config.eval.episodes) == (2, 1e-6, 32)
    assert set(config.envs) == {"Room"}


def test_a_dollar_in_a_file_of_our_own_is_text(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.yaml": "env: {system_prompt: 'It costs ${price}.'}"})
    assert load_config(path).env.system_prompt == "It costs ${price}."


SCRIPT = """
set -x
ENGINE=${1:-vllm}
size=8            # a comment
name="gigpo_${size}"
python3 -m examples.data_preprocess.prepare \\
    --mode 'text' --train_data_size $size
CUDA_VISIBLE_DEVICES=0,1 python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gigpo \\
    data.train_files=$HOME/data/train.parquet \\
    data.train_batch_size=$size data.max_prompt_length=$((1024 * 2)) \\
    env.env_name=Webshop env.rollout.n=$size +env.max_steps=15 \\
    actor_rollout_ref.rollout.name=$ENGINE \\
    trainer.logger=['console','wandb'] \\
    trainer.experiment_name="$name" $@ 2>&1 | tee log.txt
"""


def test_a_script_is_its_overrides(tmp_path: Path) -> None:
    words = read_script(SCRIPT, "run.sh").overrides
    tree = parse_overrides(words)
    assert tree["env"] == {"env_name": "Webshop", "rollout": {"n": 8}, "max_steps": 15}
    assert tree["data"]["max_prompt_length"] == 2048
    assert tree["trainer"] == {"logger": ["console", "wandb"], "experiment_name": "gigpo_8"}
    path = write(tmp_path, {"run.sh": SCRIPT})
    config = load_config(path, ["env.rollout.n=4"])
    assert (config.env.name, config.env.max_turn) == ("webshop", 15)
    assert (config.rollout.train.env_groups, config.rollout.train.group_size) == (8, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo a.b=1", "no python commands"),
        ("python -m a x.y=1\npython -m b x.y=2", "2 python commands"),
        ("python train.py --config-name base x.y=1", "give that file itself"),
        ("python -m a 'x.y=1", "No closing quotation"),
        ("python -m recipe.sppo.main_sppo x.y=1", "learns by rules of its own"),
    ],
)
def test_a_script_that_is_no_training_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_script(text, "run.sh")


def test_a_variable_that_is_not_set_is_refused_where_it_counts(tmp_path: Path) -> None:
    text = (
        "a=${NOT_SET_ANYWHERE:-${NOR_THIS:-7}}\npython -m x env.seed=$a trainer.n_gpus_per_node=$B"
    )
    assert load_config(write(tmp_path, {"run.sh": text})).seed == 7
    text = "python -m x env.seed=$NOT_SET_ANYWHERE data.shuffle_seed=2"
    with pytest.raises(ConfigError, match=r"env.seed: .*a variable in it is not set") as caught:
        load_config(write(tmp_path, {"run.sh": text}))
    assert "data.shuffle_seed: unknown key" in str(caught.value)
    text = "python -m x env.seed=3 trainer.default_local_dir=$NOT_SET_ANYWHERE/a"
    path = write(tmp_path, {"run.sh": text})
    with pytest.warns(ConfigWarning, match=r"default_local_dir: .*log.dir keeps its default"):
        assert load_config(path).log.dir == "runs"


LOOPS = """
seeds=(123 456)  # two
names=(
    # example: "k2"
)
for name in "${names[@]}"; do
    length=$(echo "$name" | sed -n 's/k//p')
    length=${length:-4}
    out="${CHECKPOINTS_OF_NOBODY}/$name"
    for seed in "${seeds[@]}"; do
        echo "seed: $seed"
        python3 -m verl.trainer.main_ppo env.seed=$seed env.history_length=$length \\
            trainer.experiment_name="${name}_seed${seed}" trainer.default_local_dir=$out \\
            trainer.val_only=True $@ 2>&1 | tee "$out.log"
    done
done
"""


def test_the_first_round_of_loops_is_taken_and_said(tmp_path: Path) -> None:
    path = write(tmp_path, {"run.sh": LOOPS})
    with pytest.warns(ConfigWarning) as caught:
        config = load_config(path)
    assert (config.seed, config.rollout.window_turns) == (123, 4)
    told = str(caught[0].message)
    for part in (
        "for seed in 123 456: the first is taken, seed=123",
        'for name in "${names[@]}": its list is empty: fill it in',
        "length=$(...): commands are not run: it is not set",
        "trainer.default_local_dir: the weights to evaluate: set model.path",
        "trainer.experiment_name: a variable in it is not set: log.name keeps its default",
    ):
        assert part in told
    assert "# - for seed in 123 456: the first is taken" in migrate(path)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("a=(1 'b c')\npython -m x k.l=${a[0]} k.m=\"${a[1]}\"", ("k.l=1", "k.m=b c")),
        ("a=(1\n  2)\npython -m x k.l=${a[1]}${a[7]}", ("k.l=2",)),
        ("for i in {1..3}; do\npython -m x k.l=$i\ndone", ("k.l=$i",)),
        ("for i in $(seq 3); do\npython -m x k.l=$i\ndone", ("k.l=$i",)),
        ("for i in 7\ndo\npython -m x k.l=$i\ndone", ("k.l=7",)),
        ("n=3\nm=$((n * 2))\npython -m x k.l=$((n + m)) k.m=$(((n+m) * (2 - 4 / 3)))",
         ("k.l=9", "k.m=9")),
        ("python -m x k.l=$((NOT_SET_ANYWHERE+1)) k.m=$((2**9)) k.n=$((1", 
         ("k.l=$((NOT_SET_ANYWHERE+1))", "k.m=$((2**9))", "k.n=$((1")),
        ("n=$((99999999999999999999 + 1))\npython -m x k.l=$n", ("k.l=$n",)),
    ],
)  # fmt: skip
def test_arrays_and_loops(text: str, overrides: tuple[str, ...]) -> None:
    assert read_script(text, "run.sh").overrides == overrides


@pytest.mark.parametrize("files", [RAGEN, {"run.sh": SCRIPT}])
def test_migrate_writes_what_the_file_means(tmp_path: Path, files: dict[str, str]) -> None:
    path = write(tmp_path, files)
    text = migrate(path)
    assert load_config(parse_yaml(text)) == load_config(path)
    assert "# These mean something else here:" in text


def test_migrate_comments_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path, RAGEN), tmp_path / "mine.yaml"
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(path), "model_path=org/other", "-o", str(out)])
    assert caught.value.code == 0
    text = out.read_text()
    assert "# - agent_proxy.use_turn_scores = false: a turn's reward always stands" in text
    assert "# - seed.val = 123: validation tasks" in text
    assert "  path: org/other  # model_path" in text
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(path), "-o", str(out)])
    assert caught.value.code == 2
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == text


def test_migrate_refuses_or_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"a.yaml": "trainer: {ref_update_freq: 2, total_epochs: 3}\n"})
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(path)])
    assert caught.value.code == 2
    assert "set backend: verl" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(path), "--leave-out"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "# Refused. Nothing here stands for these:\n# - trainer.ref_update_freq: a key" in text
    assert parse_yaml(text) == {"train": {"steps": 3}}


def test_notes_are_told_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {"a.yaml": "{seed: {train: 1, val: 2}, trainer: {n_gpus_per_node: 8}}"})
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit):
            main(["config", "show", str(path)])
    told = capsys.readouterr().err
    assert "note: keys that mean something else here:\n  - seed.val: validation tasks" in told
    assert "keys without an effect here: trainer.n_gpus_per_node" in told
