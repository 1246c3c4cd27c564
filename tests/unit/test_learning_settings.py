"""What small models need to be trained: a reply that is begun for them, legal replies spelled out,
maps as RAGEN's."""

from pathlib import Path

import pytest
from rollout_parts import CountEnv, config_for, says

from turnwise.config.load import list_recipes, load_config
from turnwise.config.schema import Config, EnvConfig
from turnwise.data.samples import episode_to_samples
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.envs.registry import make_env
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.train.trainer import PPOTrainer
from turnwise.types import Episode


def play(config: Config) -> Episode:
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories={"count": CountEnv})
    try:
        return proxy.play(0).episodes[0]
    finally:
        proxy.close()


@pytest.mark.parametrize("window", ["full", "single_turn"])
def test_a_prefix_is_read_by_both_sides_and_trained_on_by_none(window: str) -> None:
    plain = config_for(groups=1, size=1, max_turn=2)
    changes = {"response_prefix": "<answer>", "window": window}
    episode = play(plain.model_copy(update={"rollout": plain.rollout.model_copy(update=changes)}))
    assert [turn.text for turn in episode.turns] == ["<answer>go"] * 2
    tokenizer = tiny_tokenizer()
    samples = episode_to_samples(episode)
    whole = "".join(tokenizer.decode(list(sample.ids)) for sample in samples)
    assert whole.count("<|im_start|>assistant\n<answer>go<|im_end|>") == 2
    assert whole.count("<answer>") == 2 + len(episode.final_ids and [1])
    said = tokenizer.encode("go<|im_end|>")
    trained = [
        token
        for one in samples
        for token, ours in zip(one.ids, one.response_mask, strict=True)
        if ours
    ]
    assert trained == said * 2


def test_the_asked_form_spells_out_every_legal_reply() -> None:
    form = {"think": False, "max_actions_per_turn": 1, "reminder": "always", "spell_out": True}
    env = make_env(EnvConfig.model_validate({"name": "frozen_lake", "format": form}))
    opening = env.reset(env.make_task(0, "train"))
    spelled = (
        "<answer>left</answer>, <answer>down</answer>, <answer>right</answer> or "
        "<answer>up</answer>"
    )
    assert [message.content.count(spelled) for message in opening.messages] == [1, 1]


def test_goals_anywhere_can_be_reached_and_are_held_out() -> None:
    env = FrozenLake(p=0.9, random_goal=True, observation="coordinates")
    seen: dict[str, set[str]] = {"train": set(), "val": set()}
    for split, layouts in seen.items():
        for seed in range(200):
            text = env.reset(seed=seed, split=split)
            layouts.add(text.partition("Goal")[2])  # goal and holes, wherever the start
            assert env.potential() > -1.0  # there is a way
    goals = {layout.partition(".")[0] for layout in seen["train"]}
    assert len(goals) == 16
    assert not seen["train"] & seen["val"]


def test_a_run_that_is_out_of_time_ends_as_after_its_last_step(tmp_path: Path) -> None:
    words = ["train.steps=50", "train.max_minutes=1e-9", "train.epochs=1", "train.mini_batches=1"]
    words += ["rollout.train.env_groups=2", "rollout.slots=4"]
    words += ["eval.episodes=4", "eval.baselines=false"]
    words += ["model.embedded.warmstart_episodes=16", f"log.dir={tmp_path}", "log.report=false"]
    result = PPOTrainer(load_config("frozen_lake", words)).fit()
    assert result.steps == 1
    assert result.after is not None
    assert result.after.step == 1
    assert result.checkpoint is not None
    assert "train.max_minutes" in (result.path / "events.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [name for name in list_recipes() if name.startswith(("smollm2", "qwen"))]
)
def test_recipes_for_real_models_say_the_same_about_turns(name: str) -> None:
    config = load_config(name, ["model.path=somewhere"])
    env = make_env(config.env)
    opening = env.reset(env.make_task(0, "val"))
    assert config.rollout.eval_temperature == config.rollout.temperature, (
        "before and after, the policy as trained"
    )
    assert opening.messages[-1].role == "user"
    assert config.env.max_turn in (None, config.train.max_turn)
