"""The verl backend before Ray starts: what is mapped, what is refused, and what a user is told."""

import runpy
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl_parts import ROOT, run_python, tiny_config, tiny_folder

from turnwise.algos import build_algorithm
from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.config.store import ConfigStore
from turnwise.config.tree import ConfigError
from turnwise.envs.base import BaseEnv, Env, EnvTimeoutError
from turnwise.envs.games.simple_game import SimpleGameEnvironment
from turnwise.integrations.memory import recomputes
from turnwise.integrations.verl.config import require
from turnwise.integrations.verl.config.compose import compose
from turnwise.integrations.verl.config.keys import _is_known
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.config.resolve import place_model, resolve
from turnwise.integrations.verl.config.settings import (
    PACKED_ATTENTION,
    UnsupportedError,
    refusals,
    verl_settings,
)
from turnwise.integrations.verl.faults.cluster import (
    ClusterError,
    check_engine,
    find_placement,
    start_ray,
)
from turnwise.integrations.verl.trainer.custom import (
    CustomEnvironmentDataset,
    EnvironmentRewardWrapper,
    Loading,
    _create_verl_config,
    replace_loaders,
)
from turnwise.integrations.verl.trainer.pools import (
    _default_resource_pool,
    _default_role_mapping,
    check_pool,
    check_roles,
)
from turnwise.integrations.verl.trainer.run import train
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.types import Message

pytestmark = pytest.mark.verl


def _verl_config(folder: Path, *overrides: str) -> Any:
    config = tiny_config(folder, *overrides)
    return compose(
        verl_settings(config, placement=Placement(), model_path="m", run_dir=str(folder))
    )


def test_settings_reach_verls_config(tmp_path: Path) -> None:
    config = _verl_config(
        tmp_path,
        "algo.clip_high=0.3",
        "algo.value_clip=null",
        "algo.kl_coef=0.01",
        "algo.kl_form=k2",
        "train.mini_batches=2",
        "train.critic_warmup=3",
        "train.weight_decay=0.1",
        "rollout.temperature=0.7",
        "verl={critic.optim.lr: 0.5}",
    )
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.3)
    assert actor.policy_loss.loss_mode == "turnwise_clip_token"
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.01, "mse")
    assert (
        actor.ppo_mini_batch_size,
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
    ) == (1, 2, 2)
    assert actor.optim.weight_decay == config.critic.optim.weight_decay == 0.1
    assert config.critic.cliprange_value > 1e6
    assert config.critic.optim.lr == 0.5  # what stands under `verl` wins
    assert config.critic.enable is True
    assert config.trainer.critic_warmup == 4  # verl counts steps from 1
    assert config.actor_rollout_ref.rollout.temperature == 0.7


def test_nothing_is_saved_where_nothing_shall_be(tmp_path: Path) -> None:
    assert _verl_config(tmp_path, "checkpoint.every=5").trainer.save_freq == 5
    assert (
        _verl_config(tmp_path, "checkpoint.every=5", "checkpoint.write=false").trainer.save_freq
        == -1
    )


def test_gradient_checkpointing_is_decided_by_memory(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    algorithm = build_algorithm(config.algo)
    gpus = Placement(gpus=2, device="cuda")

    def decide(config: Config, *, placement: Placement = gpus, budget: int | None = None) -> bool:
        return recomputes(
            config,
            algorithm,
            device=placement.device,
            ranks=placement.ranks,
            tokens=4096,
            budget=budget,
        )

    assert not decide(config, budget=80 << 30)
    assert decide(config, budget=16 << 20)
    assert not decide(config, placement=Placement(), budget=16 << 20)  # the CPU
    given = tiny_config(tmp_path, "model.gradient_checkpointing=false")
    assert not decide(given, budget=16 << 20)
    if not torch.cuda.is_available():  # a driver that cannot know takes the safe way
        assert decide(config)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attention packs here")
def test_rows_are_packed_without_flash_attention_where_the_model_allows_it(tmp_path: Path) -> None:
    gpu = Placement(gpus=1, device="cuda")

    def chosen(*overrides: str, placement: Placement = gpu) -> list[tuple[bool, str]]:
        config = tiny_config(tmp_path, "verl={actor_rollout_ref.rollout.name: hf}", *overrides)
        found = verl_settings(config, placement=placement, model_path="m", run_dir=str(tmp_path))
        return [
            (
                found[f"{where}.model.use_remove_padding"],
                found[f"{where}.model.override_config.attn_implementation"],
            )
            for where in ("actor_rollout_ref", "critic")
        ]

    assert chosen() == [(True, PACKED_ATTENTION)] * 2
    assert chosen("train.packing=false") == [(False, "sdpa")] * 2
    assert chosen(placement=Placement()) == [(False, "sdpa")] * 2  # the CPU
    assert chosen("train.packing=true", placement=Placement()) == [(True, PACKED_ATTENTION)] * 2
    tiny_model("gemma2").save_pretrained(tmp_path / "capped")
    capped = f"model.path={tmp_path / 'capped'}"
    assert chosen(capped) == [(False, "sdpa")] * 2
    with pytest.raises(UnsupportedError, match="it caps its attention logits"):
        chosen(capped, "train.packing=true")


def test_attention_over_packed_rows_refuses_what_it_cannot_do() -> None:
    from turnwise.integrations.verl.engines.attention import attention

    states = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"set train\.packing to false"):
        attention(torch.nn.Identity(), states, states, states)
    code = """
import torch
import verl.utils.ulysses as ulysses
from turnwise.integrations.verl.engines.attention import attention
ulysses.get_ulysses_sequence_parallel_world_size = lambda: 2
states, positions = torch.zeros(1, 2, 5, 8), torch.tensor([[0, 1, 2, 0, 1]])
try:
    attention(torch.nn.Identity(), states, states, states, position_ids=positions)
except ValueError as error:
    assert "ulysses_sequence_parallel_size" in str(error), error
else:
    raise SystemExit("not refused")
"""
    outcome = run_python(code)
    assert outcome.code == 0, outcome.text[-2000:]


def test_importing_the_plugin_changes_no_platform() -> None:
    """On a machine without a GPU too, where only VERL_PLATFORM=cpu asks for ours"""
    code = """
import os
from verl.plugin.platform import PlatformRegistry, get_platform
before = (PlatformRegistry.registered_names(), type(get_platform()).__name__)
import turnwise.integrations.verl.engines.plugin
assert before == (PlatformRegistry.registered_names(), type(get_platform()).__name__), before
from turnwise.integrations.verl.faults.cluster import use_device
assert use_device("cpu")["VERL_PLATFORM"] == os.environ["VERL_PLATFORM"] == "cpu"
assert get_platform().device_name == "cpu"
assert "VERL_PLATFORM" not in use_device("cuda")
assert "VERL_PLATFORM" not in os.environ
assert get_platform().device_name == "cuda"
"""
    outcome = run_python(code)
    assert outcome.code == 0, outcome.text[-2000:]


def test_overrides_join_a_cluster(tmp_path: Path) -> None:
    from turnwise.integrations.verl.overrides import main

    source = tmp_path / "given.yaml"
    source.write_text(tiny_config(tmp_path).model_dump_json())
    words = main([str(source), "--nodes", "2", "--gpus", "4", "--address", "head:6379"])
    assert "++ray_kwargs.ray_init.address='head:6379'" in words
    assert "++trainer.nnodes=2" in words
    assert "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM='cpu'" in words
    assert not any("ray_init.num_gpus" in word for word in words)
    with pytest.raises(SystemExit, match="--address needs host:port"):
        main([str(source), "--address"])


def test_overrides_keep_what_is_said_of_ray(tmp_path: Path) -> None:
    from turnwise.integrations.verl.overrides import main

    source = tmp_path / "given.yaml"
    source.write_text(tiny_config(tmp_path).model_dump_json())
    words = main([str(source), "verl.ray_kwargs.ray_init.num_cpus=3"])
    assert [word for word in words if "ray_init.num_cpus" in word] == [
        "++ray_kwargs.ray_init.num_cpus=3"
    ]


def test_groups_need_no_critic(tmp_path: Path) -> None:
    assert _verl_config(tmp_path, "algo.name=gspo").critic.enable is False


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.critic=shared", "model.critic"),
        ("model.lora.rank=8", "hf engine"),
        ("verl={critic.optim.lr_scheduler_type: cosine}", "use train.schedule"),
        ("train.mini_batches=3", "a divisor"),
        ("train.deterministic=true", "train.deterministic"),
        ("eval.baselines=true", "eval.baselines"),
        ("train.time_limit=3", "train.time_limit"),
    ],
)
def test_what_verl_cannot_honour_is_refused_by_name(
    tmp_path: Path, setting: str, said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        train(tiny_config(tmp_path, setting))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("trainer.sav_freq: 3", r"verl\.trainer\.sav_freq: .*did you mean trainer\.save_freq"),
        ("trainr.save_freq: 3", r"trainr\.save_freq: .*did you mean trainer\.save_freq"),
        ("trainer: {sav_freq: 3}", r"verl\.trainer\.sav_freq: verl has no such key"),
        ("trainer.save_freq.often: 3", r"trainer\.save_freq\.often: verl has no such key"),
        ("critic.optim.weight_decai: 1", r"did you mean critic\.optim\.weight_decay"),
        ("turnwise.lokstep: true", r"turnwise\.lokstep: verl has no such key"),
        ("algorithm.gamma: 0.9", "set algo.gamma"),
        ("algorithm: {lam: 0.9}", "set algo.lam"),
        ("trainer.v1.trainer_mode: separate_async", "synchronous"),
        ("trainer.v1.colocate_async.num_warmup_batches: 2", "none is carried over"),
        ("actor_rollout_ref.rollout.over_sample_rate: 0.2", "set rollout.enough_groups"),
        ("critic.ppo_mini_batch_size: 1", "set train.mini_batches"),
        ("actor_rollout_ref.rollout.temperature: 0.5", "set rollout.temperature"),
        ("reward.custom_reward_function.path: x.py", "environments reward"),
        ("actor_rollout_ref.rollout.multi_turn.enable: true", "turnwise plays the turns"),
        ("actor_rollout_ref.actor.clip_ratio: 0.3", "set algo.clip_low and algo.clip_high"),
        ("actor_rollout_ref.actor.kl_loss_coef: 0.3", "set algo.kl_coef"),
        ("critic.optim.min_lr_ratio: 0.1", "use train.schedule"),
        ("actor_rollout_ref.model.lora_rank: 8", "set model.lora.rank"),
        ("data.max_response_length: 32", "set rollout.max_response_tokens"),
        ("data.apply_chat_template_kwargs: {think: false}", "set model.chat_template_args"),
        ("ray_kwargs.ray_init.address: auto", "pass --address"),
        ("trainer.val_only: true", "use `turnwise eval`"),
        ("distillation.enabled: true", "losses have no teacher"),
        ("skip.rollout_tq.enable: true", "plays every step"),
        ("turnwise.lockstep: no", "turnwise.lockstep='no': takes true or false"),
        ("trainer: {v1: null}", r"trainer\.v1=None: a section of verl's"),
        ("algorithm: 3", "algorithm=3: a section of verl's"),
    ],
)
def test_keys_of_verl_are_checked(tmp_path: Path, key: str, said: str) -> None:
    """Before Ray starts, and before a run directory is made"""
    with pytest.raises(UnsupportedError, match=said):
        train(tiny_config(tmp_path, f"verl={{{key}}}"))
    assert not (tmp_path / "runs").exists()


def test_what_verl_knows_is_taken(tmp_path: Path) -> None:
    """Keys of its files, fields of its classes, and sections that it leaves open"""
    settings = verl_settings(
        tiny_config(tmp_path, "algo.kl_coef=0.1"),
        placement=Placement(),
        model_path="m",
        run_dir="r",
    )
    assert [key for key in settings if not _is_known(key)] == []
    config = _verl_config(
        tmp_path,
        "verl={trainer: {save_freq: 7}, actor_rollout_ref.rollout.engine_kwargs.vllm.foo: 1,"
        " critic.fsdp.mixed_precision.param_dtype: fp32, ray_kwargs.ray_init.num_cpus: 3,"
        " actor_rollout_ref.model.override_config.rope_scaling: null}",
    )
    assert config.trainer.save_freq == 7
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.foo == 1
    assert config.ray_kwargs.ray_init.num_cpus == 3


def test_arguments_of_the_template_reach_verls_tokenizer(tmp_path: Path) -> None:
    template = "{{ 'off' if not thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    args = ("model.chat_template_args={thinking: false}", f"model.chat_template={template!r}")
    config = tiny_config(tmp_path, *args)
    model_path, tokenizer_path = place_model(config, tmp_path / "run")
    assert (model_path, tokenizer_path) == (config.model.path, str(tmp_path / "run" / "tokenizer"))
    stored = AutoTokenizer.from_pretrained(tokenizer_path)
    assert stored.apply_chat_template([{"content": "hi"}], tokenize=False) == "offhi"
    settings = verl_settings(
        config,
        placement=Placement(),
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        run_dir="r",
    )
    assert settings["actor_rollout_ref.model.tokenizer_path"] == tokenizer_path
    assert "actor_rollout_ref.model.custom_chat_template" not in settings


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        train(tiny_config(tmp_path, "train.deterministic=true", "model.critic=shared"))
    assert "train.deterministic" in str(caught.value)
    assert "model.critic" in str(caught.value)


def test_every_recipe_runs_on_verl(tmp_path: Path) -> None:
    """As it is, or with the one setting that the refusal names"""
    names = {path.stem for path in (ROOT / "turnwise" / "config" / "recipes").glob("*.yaml")}
    own_trunk = {"frozen_lake", "default", "key_door"}
    staged = {
        "key_door",
        "qwen_1_5b_alfworld",
        "qwen_1_5b_alfworld_think",
        "qwen_1_5b_countdown_think",
        "qwen_1_5b_sokoban_imitate",
        "qwen_1_5b_webshop",
        "smollm2_alfworld",
        "smollm2_sokoban_imitate",
    }
    for name in staged:
        with pytest.raises(ConfigError, match="run `turnwise sft` first"):
            load_config(name, ["backend=verl"])
    for name in names:
        words = ["backend=verl", *(["sft.source=[]"] if name in staged else [])]
        if name in own_trunk:
            (why,) = refusals(load_config(name, words))
            assert "use separate" in why
            words.append("model.critic=separate")
        assert refusals(load_config(name, words)) == []


def test_an_unknown_environment_is_named_before_ray_starts(tmp_path: Path) -> None:
    import ray

    with pytest.raises(ValueError, match=r"simple_gme.*did you mean simple_game"):
        train(tiny_config(tmp_path, "env.name=simple_gme"))
    assert not ray.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"train.device is 'cuda', but this machine has no GPU"):
        train(tiny_config(tmp_path, "train.device=cuda"))
    with pytest.raises(ClusterError, match="4 GPUs were asked for, but this machine has no GPU"):
        find_placement(device="auto", gpus=4)
    with pytest.raises(ClusterError, match="2 nodes need a running Ray cluster"):
        find_placement(device="cpu", nodes=2)
    assert find_placement(device="auto") == Placement(nodes=1, gpus=1, device="cpu")


def test_a_cluster_that_does_not_answer() -> None:
    with pytest.raises(ClusterError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        start_ray(Placement(), address="127.0.0.1:1")


@pytest.mark.parametrize(
    ("version", "said"), [("0.6.1", "too old"), ("0.9.0", "too old"), ("0.10.0", "too new")]
)
def test_other_versions_of_verl_are_refused(version: str, said: str) -> None:
    with pytest.raises(require.VerlUnavailableError, match=said):
        require.check_version(version)


def test_a_missing_ray_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = require.find_spec
    monkeypatch.setattr(require, "find_spec", lambda name: None if name == "ray" else there(name))
    with pytest.raises(
        require.VerlUnavailableError, match=r"needs ray.*pip install 'turnwise\[verl\]'"
    ):
        train(tiny_config(tmp_path))


def test_a_missing_engine_is_named_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        require, "find_spec", lambda name: None if name == "sglang" else find_spec(name)
    )
    config = tiny_config(tmp_path, "verl={actor_rollout_ref.rollout.name: sglang}")
    with pytest.raises(
        require.VerlUnavailableError, match=r"sglang is not installed here.*0\.5\.12.*name hf"
    ):
        train(config)
    assert not (tmp_path / "runs").exists()
    check_engine("sglang", address="head:6379")  # the cluster's nodes may have it


def test_sglang_gets_a_tokenizer_for_stop_strings(tmp_path: Path) -> None:
    """Its scheduler dies of a stop string where it has none, and verl gives it none by itself"""
    sglang = (
        "verl={actor_rollout_ref.rollout.name: sglang, "
        "actor_rollout_ref.rollout.engine_kwargs.sglang.page_size: 4}"
    )
    rollout = _verl_config(tmp_path, sglang, "rollout.slots=4").actor_rollout_ref.rollout
    assert (rollout.name, rollout.skip_tokenizer_init) == ("sglang", True)
    assert rollout.engine_kwargs.sglang.max_total_tokens == 4 * 768
    assert (rollout.engine_kwargs.sglang.device, rollout.engine_kwargs.sglang.page_size) == (
        "cpu",
        4,
    )
    rollout = _verl_config(tmp_path, sglang, "rollout.stop=['</answer>']").actor_rollout_ref.rollout
    assert rollout.skip_tokenizer_init is False


def test_lora_reaches_verl(tmp_path: Path) -> None:
    """verl's own config class takes no float for alpha"""
    words = ("verl={actor_rollout_ref.rollout.name: sglang}", "model.lora.rank=4")
    model = _verl_config(tmp_path, *words, "model.lora.alpha=8.0").actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, type(model.lora_alpha), model.lora.merge) == (
        4,
        8,
        int,
        True,
    )
    with pytest.raises(
        UnsupportedError, match=r"model\.lora\.alpha=0\.5: verl takes a whole number"
    ):
        _verl_config(tmp_path, *words, "model.lora.alpha=0.5")


def test_the_seeds_config_is_taken(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    seed = OmegaConf.create(
        {
            "trainer": {"total_epochs": 10},
            "algorithm": {"adv_estimator": "gae"},
            "agent": {"max_turn": 5, "agent_length": 4},
            "env_template": ["simple_game"],
            "log": {"dir": str(tmp_path)},
            "train": {"device": "cpu"},
            "model": {"path": "m"},
        }
    )
    verl_config, ours, recorder = resolve(seed, factories={})
    recorder.close()
    assert (ours.train.steps, ours.train.max_turn, ours.rollout.train.env_groups) == (10, 5, 4)
    assert verl_config.trainer.total_training_steps == 10
    assert verl_config.critic.enable is True


ACTOR = "actor_rollout_ref.actor"
VAL = "actor_rollout_ref.rollout.val_kwargs"


def _whole(folder: Path, **changes: Any) -> Any:
    """A whole config of verl's, as Hydra composes it, with the keys of an agent beside it."""
    settings = {
        "trainer.total_epochs": 7,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": str(folder / "runs"),
        "algorithm.gamma": 0.9,
        "data.train_batch_size": 2,
        "data.max_prompt_length": 300,
        "data.max_response_length": 200,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.temperature": 0.7,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.model.path": str(tiny_folder(folder)),
        "critic.optim.lr": 1e-3,
    }
    config = compose(settings | changes)
    OmegaConf.set_struct(config, False)
    config.agent = {"max_turn": 3, "agent_length": 4}
    config.env_template = ["simple_game"]
    return config


def test_a_whole_config_of_verls_is_read_whole(tmp_path: Path) -> None:
    config, ours, recorder = resolve(_whole(tmp_path), factories={})
    recorder.close()
    assert (ours.train.steps, ours.train.max_turn) == (7, 3)
    assert ours.rollout.train.tags == ("simple_game",)
    assert (ours.algo.name, ours.algo.gamma, ours.algo.clip_low) == ("ppo", 0.9, 0.2)
    assert (ours.rollout.temperature, ours.rollout.max_context) == (0.7, 500)
    assert (ours.rollout.train.env_groups, ours.rollout.train.group_size) == (2, 2)
    assert (ours.train.mini_batches, ours.train.lr, ours.train.critic_lr) == (2, 1e-4, 1e-3)
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.3  # verl's own affair
    assert (config.trainer.total_training_steps, config.trainer.n_gpus_per_node) == (7, 1)
    assert config.data.custom_cls.name == "EnvDataset"
    assert recorder.path is not None
    assert recorder.path.parent == tmp_path / "runs"


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"trainer.total_training_steps": 5}, lambda ours: ours.train.steps == 5),
        (
            {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.28},
            lambda ours: (ours.algo.clip_low, ours.algo.clip_high) == (0.1, 0.28),
        ),
        ({"algorithm.adv_estimator": "grpo"}, lambda ours: ours.algo.name == "grpo"),
        (
            {f"{VAL}.temperature": 0.6, f"{VAL}.do_sample": True},
            lambda ours: ours.rollout.eval_temperature == 0.6,
        ),
    ],
)
def test_verls_defaults_contradict_nothing_in_a_whole_config(
    tmp_path: Path, changes: dict[str, Any], read: Callable[[Config], bool]
) -> None:
    _, ours, recorder = resolve(_whole(tmp_path, **changes), factories={})
    recorder.close()
    assert read(ours)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("actor_rollout_ref.actor.clip_ratio", 0.3, "contradicts"),
        ("data.custom_cls.path", "mine.py", r"data\.custom_cls\.path.*pass train_dataset"),
        ("trainer.v1.trainer_mode", "separate_async", "synchronous"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "cosine", "use train.schedule"),
        ("algorithm.filter_groups.enable", True, "set algo.filter"),
        ("critic.ppo_mini_batch_size", 2, r"critic\.ppo_mini_batch_size = 2: actor and critic"),
        ("reward.custom_reward_function.path", "r.py", "environments reward"),
    ],
)
def test_what_a_whole_config_cannot_have_is_refused_by_name(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        resolve(_whole(tmp_path, **{key: value}), factories={})
    assert not (tmp_path / "runs").exists()


def test_contradicting_sizes_are_refused(tmp_path: Path) -> None:
    from omegaconf import open_dict

    config = _verl_config(tmp_path)
    with open_dict(config):
        config.turnwise = {
            "json": tiny_config(tmp_path, "rollout.train.env_groups=4").model_dump_json()
        }
    with pytest.raises(
        ValueError, match=r"data.train_batch_size = 2 contradicts rollout.train.env_groups = 4"
    ):
        resolve(config, factories={})


def test_a_config_of_verls_without_ours_says_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\+turnwise.config="):
        resolve(_verl_config(tmp_path), factories={})


def test_roles_and_pools(tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import Role

    config = _verl_config(tmp_path, "algo.kl_coef=0.1")
    roles = _default_role_mapping(config)
    assert set(roles) == {Role.ActorRolloutRef, Role.Critic}
    pool = _default_resource_pool(config)
    assert pool.get_n_gpus() == 1
    assert _default_resource_pool().get_n_gpus() == max(1, torch.cuda.device_count())
    assert set(_default_role_mapping()) == {Role.ActorRollout, Role.Critic}
    check_roles(roles, roles)
    check_pool(pool, {role: "global_pool" for role in roles})
    with pytest.raises(ValueError, match=r"missing: \['Critic'\]"):
        check_roles({Role.ActorRolloutRef: object}, roles)
    with pytest.raises(ValueError, match=r"without use: \['RewardModel'\]"):
        check_roles({**roles, Role.RewardModel: object}, roles)
    with pytest.raises(ValueError, match="gives no pool to role Critic"):
        check_pool(pool, {Role.Critic: "x"}) if pool.mapping.pop(Role.Critic) else None


def test_config_store_to_verl(tmp_path: Path) -> None:
    store = ConfigStore()
    store.training.num_epochs = 7
    store.train.device = "cpu"
    store.log.dir = str(tmp_path)
    store.model.path = "m"
    config = _create_verl_config(store)
    assert config.trainer.total_training_steps == 7
    assert config.trainer.v1.trainer_mode == "turnwise"
    assert Path(config.turnwise.run_dir).parent == tmp_path
    _, ours, recorder = resolve(config, factories={})
    recorder.close()
    assert ours.train.steps == 7


def test_the_data_set_has_the_prompts_of_the_agents() -> None:
    config = Config(backend="verl", rollout={"train": {"env_groups": 3}})
    tokenizer = tiny_tokenizer()
    rows = CustomEnvironmentDataset(
        SimpleGameEnvironment(), tokenizer, config=config, size=5, max_length=600
    )
    row = rows[4]
    shown = tokenizer.decode(row["input_ids"][row["attention_mask"].bool()])
    assert row["raw_prompt"][-1]["content"] in shown
    assert "You are at" in row["raw_prompt"][-1]["content"]
    assert rows[0]["raw_prompt"] == rows[0]["raw_prompt"] != rows[1]["raw_prompt"]
    with pytest.raises(ValueError, match="raise max_length"):
        CustomEnvironmentDataset(SimpleGameEnvironment(), tokenizer, config=config, max_length=10)[
            0
        ]


class _Walker:
    """Plays on in the direction of the first reply."""

    def run_episode(self, env: Env, response: str) -> float:
        total, done = 0.0, False
        for _ in range(20):
            result = env.step(Message(role="assistant", content=response))
            total, done = total + result.reward, result.done
            if done:
                break
        return total


def test_rewards_of_one_step_and_of_a_whole_episode() -> None:
    from turnwise.data.batch import collate
    from turnwise.integrations.verl.rollout.convert import batch_to_dataproto
    from turnwise.types import Sample

    config = load_config({"env": {"format": {"think": False}}, "backend": "verl"})
    tokenizer = tiny_tokenizer()
    tasks = CustomEnvironmentDataset(SimpleGameEnvironment(), tokenizer, config=config)
    env = SimpleGameEnvironment()
    env.reset(seed=tasks.task(0).seed, split="train")
    towards = "right" if env._target > env._place else "left"
    said = tokenizer.encode(f"<answer>{towards}</answer>")
    sample = Sample(
        ids=(1, *said),
        response_mask=(False, *[True] * len(said)),
        loss_mask=(False, *[True] * len(said)),
        logprobs=(0.0, *[-1.0] * len(said)),
        turn_ids=(-1, *[0] * len(said)),
        rewards=(0.0,) * (1 + len(said)),
        state_keys={0: "s"},
        episode_id="e",
        group_id=0,
        truncated=False,
    )
    data = batch_to_dataproto(collate([sample]))
    data.non_tensor_batch |= {"index": [0], "split": ["train"]}
    options: dict[str, Any] = {"config": config}
    one = EnvironmentRewardWrapper(SimpleGameEnvironment(), tokenizer, **options)(data)
    assert one.tolist() == [float(abs(env._target - env._place) == 1)]
    shaped = EnvironmentRewardWrapper(
        SimpleGameEnvironment(),
        tokenizer,
        reward_fn=lambda reward, text, info: reward + 5.0,
        **options,
    )(data)
    assert shaped.tolist() == [one.item() + 5.0]
    with pytest.raises(ValueError, match="reward_fn judges a single step"):
        EnvironmentRewardWrapper(
            SimpleGameEnvironment(),
            tokenizer,
            reward_fn=lambda *_: 0.0,
            multi_turn_engine=_Walker(),
            **options,
        )
    whole = EnvironmentRewardWrapper(
        SimpleGameEnvironment(), tokenizer, multi_turn_engine=_Walker(), **options
    )(data)
    assert whole.tolist() == [1.0]
    # The seeds' order of arguments, and verl's form of a reward function.
    late = EnvironmentRewardWrapper(SimpleGameEnvironment(), lambda reward, text, info: reward + 5)
    with pytest.raises(ValueError, match="no tokenizer yet"):
        late(data)
    late.bind(tokenizer, config)
    assert late(data).tolist() == shaped.tolist()
    verls = EnvironmentRewardWrapper(SimpleGameEnvironment(), lambda data: torch.ones(len(data)))
    assert verls(data).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"takes \(data\) or .*; this one takes \(a, b\)"):
        EnvironmentRewardWrapper(SimpleGameEnvironment(), lambda a, b: 0.0)


class _Meets(BaseEnv):
    """Each of its steps waits until another one is under way."""

    barrier = threading.Barrier(2)

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.barrier.wait(60)
        return "met", 2.0, True, {}


class _HangsHere(_Meets):
    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        threading.Event().wait(1000)
        raise AssertionError


def test_the_wrapper_plays_in_parallel_and_within_limits() -> None:
    from verl import DataProto

    config = load_config({"env": {"format": {"style": "raw"}}, "backend": "verl"})
    said = torch.tensor([[5, 6]] * 4)
    data = DataProto.from_dict({"responses": said, "response_mask": torch.ones_like(said)})
    data.non_tensor_batch |= {"index": [0, 1, 2, 3], "split": ["train"] * 4}
    wrapper = EnvironmentRewardWrapper(_Meets, tiny_tokenizer(), config=config)
    assert wrapper(data).tolist() == [2.0] * 4
    config = load_config(
        {"env": {"format": {"style": "raw"}}, "rollout": {"step_timeout": 0.2}, "backend": "verl"}
    )
    with pytest.raises(EnvTimeoutError, match=r"step took longer than 0\.2 s"):
        EnvironmentRewardWrapper(_HangsHere, tiny_tokenizer(), config=config)(data)


def test_what_a_trainer_cannot_take_is_refused_by_name(tmp_path: Path) -> None:
    from turnwise.integrations.verl import AgentTrainer

    config = tiny_config(tmp_path)
    with pytest.raises(ValueError, match=r"device_name is 'cuda', but the run's device is 'cpu'"):
        AgentTrainer(config, device_name="cuda")
    with pytest.raises(ValueError, match="EnvironmentRewardWrapper"):
        AgentTrainer(config, reward_fn=lambda reward, observation, info: 0.0)
    with pytest.raises(ValueError, match="processor must be None"):
        AgentTrainer(config, processor=object())
    trainer = AgentTrainer(config, device_name="cpu", train_sampler=[1, 0], collate_fn=list)
    with pytest.raises(ValueError, match=r"call init_workers\(\) first"):
        trainer._generate_multi_turn_sequences(None)


def test_a_sampler_and_a_collate_function_reach_the_loaders() -> None:
    rows = CustomEnvironmentDataset(SimpleGameEnvironment(), tiny_tokenizer(), size=4)
    loaders = SimpleNamespace(
        config=SimpleNamespace(
            data=OmegaConf.create(
                {"train_batch_size": 2, "val_batch_size": None, "dataloader_num_workers": 0}
            )
        ),
        train_dataset=rows,
        val_dataset=rows,
    )
    given = Loading(train_sampler=[3, 1], collate_fn=lambda rows: [row["index"] for row in rows])
    replace_loaders(loaders, given)
    assert list(loaders.train_dataloader) == [[3, 1]]
    assert list(loaders.val_dataloader) == [[0, 1, 2, 3]]


def test_create_trainer_is_at_the_front_door() -> None:
    import turnwise
    from turnwise.integrations.verl import create_trainer

    assert turnwise.create_trainer is create_trainer


def test_the_capability_table_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "capability_table.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), (
        "run scripts/capability_table.py"
    )
