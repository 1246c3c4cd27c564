"""The Python interface: train and evaluate with objects, episodes as a table, parts by name, a
running event loop."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from python_parts import SMALL, Coin, Counts, above_group, brevity, reinforce
from train_parts import batch, sample

import turnwise
from turnwise.algos import build_algorithm, compute_advantages, policy_loss, token_weights
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import collate
from turnwise.generate.check import check_generator
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.log.callbacks import CallbackError
from turnwise.procs.event_loop import EventLoop
from turnwise.rollout.agents import Agent, agent_class, find_shaper
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Completion, Message
from turnwise.user_code import UnknownNameError, find_part, load_object, name_of, register_part


def build(**settings: object) -> Any:
    return build_algorithm(AlgoConfig.model_validate(settings))


def train(tmp_path: Path, **arguments: Any) -> Any:
    over = {"log.dir": str(tmp_path), **arguments.pop("overrides", {})}
    return turnwise.train(
        arguments.pop("env", Coin), config=SMALL, overrides=over, quiet=True, **arguments
    )


def test_objects_train_inside_a_running_event_loop(tmp_path: Path) -> None:
    counts = Counts()

    async def cell() -> Any:
        return train(
            tmp_path, algorithm=above_group, loss=reinforce, shaper=brevity, callbacks=[counts]
        )

    result = asyncio.run(cell())
    assert counts.heard == {
        "turn": 32,
        "episode": 32,
        "step": 2,
        "evaluation": 2,
        "checkpoint": 2,
        "end": 1,
    }
    assert [row["step"] for row in result.metrics()] == [0, 1, 2]
    table = turnwise.rows(result.episodes())
    assert len(table) == 32
    assert {row["reward/shaper"] for row in table} == {-0.25}
    assert {row["reward"] for row in table} <= {-0.35, -0.25, 0.75}
    assert result.reader.config.algo.name.endswith("python_parts.py:above_group")
    again = turnwise.evaluate(result, episodes=8)
    assert (again.reward.estimate, len(again.episodes)) == (result.after.reward[1], 8)


def test_a_callback_ends_a_run_and_a_failing_one_fails_it(tmp_path: Path) -> None:
    class Enough(turnwise.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            raise turnwise.StopTraining("enough")

    class Broken(turnwise.Callback):
        def on_turn(self, turn: Any, *, episode_id: str, index: int) -> None:
            raise KeyError("mine")

    result = train(tmp_path / "a", callbacks=[Enough])
    assert (result.steps, result.after is not None) == (1, True)
    told = [event["message"] for event in result.reader.events() if event["kind"] == "stopped"]
    assert told == ["a callback ended the run after step 1: enough"]
    with pytest.raises(CallbackError, match=r"Broken: on_turn raised KeyError: 'mine' \(.*line"):
        train(tmp_path / "b", callbacks=Broken())
    with pytest.raises(ValueError, match=r"derive its class from turnwise\.Callback"):
        train(tmp_path / "c", callbacks=[object()])


def test_an_own_agent_and_generator_play(tmp_path: Path) -> None:
    class Shouting(Agent):
        def observe(self, messages: Any) -> Any:
            return [Message(role=m.role, content=m.content.upper()) for m in messages]

    def make(tokenizer: Any) -> ScriptedGenerator:
        return ScriptedGenerator(lambda *_: "heads", tokenizer=tokenizer, logprob=-0.7)

    over = {"train.max_gap": 100.0, "eval.before": False}
    result = train(tmp_path, agent=Shouting, generator=make, overrides=over)
    episodes = result.episodes(1)
    assert {episode.turns[0].text for episode in episodes} == {"heads"}
    assert "A LITTLE BIRD" in episodes[0].prompt[1].content


def test_evaluate_takes_players_functions_and_copies_of_an_object() -> None:
    def tails(situation: Any) -> str:
        return "tails"

    for policy in ("random", tails):
        result = turnwise.evaluate(policy, Coin(), episodes=8, config=SMALL)
        assert len(result.outcomes) == 8
    assert result.player == "tails"
    assert 0.0 < result.success.estimate < 1.0
    per_turn = turnwise.rows(result.episodes, per="turn")
    assert turnwise.columns(per_turn)["text"] == ["tails"] * 8


def split_batch() -> Any:
    """Two groups; one episode was cut into two rows by a window."""
    rows = [
        sample([1, 2, 7, 8], "..00", episode="a", group=0, reward=0.25),
        sample([1, 3, 9], "..1", episode="a", group=0, reward=1.0),
        sample([1, 2, 6, 4], "..00", episode="b", group=0, reward=0.0),
        sample([4, 7, 8], ".00", episode="c", group=1, reward=0.5),
        sample([4, 6, 1, 2, 5], ".00.1", episode="d", group=1, reward=2.0),
    ]
    return collate(rows, pad_id=0)


def test_an_own_estimator_sees_episodes_as_rows_and_agrees_with_the_preset() -> None:
    theirs, _ = compute_advantages(split_batch(), build(name="dr_grpo"))
    ours, _ = compute_advantages(split_batch(), build(name=name_of(above_group)))
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    assert not ours.advantages[~split_batch().response_mask].any()


def test_an_own_estimator_with_values_gets_a_critic_and_returns() -> None:
    def monte_carlo(rewards: Any, values: Any, mask: Any, gamma: float) -> Any:
        assert gamma in (0.97, 0.5)
        return torch.where(mask, rewards.sum(-1, keepdim=True) - values, 0.0)

    def masked(rewards: Any, values: Any, mask: Any, gamma: float) -> Any:
        return monte_carlo(torch.where(mask, rewards, 0.0), values, mask, gamma)

    algorithm = build(name=name_of(masked), gamma=0.5)
    assert (algorithm.needs_critic, algorithm.needs_groups) == (True, False)
    scored = split_batch()
    scored = scored.replace(
        values=torch.full_like(scored.rewards, 0.5), bootstrap=torch.zeros(scored.num_rows)
    )
    found, _ = compute_advantages(scored, algorithm)
    assert found.advantages[0, 2].item() == pytest.approx(0.75)
    assert found.returns[0, 2].item() == pytest.approx(1.25)
    with pytest.raises(ValueError, match=r"algo\.lam=0\.9 means nothing"):
        build(name=name_of(masked), lam=0.9)


def test_an_own_loss_has_the_gradient_of_the_same_surrogate() -> None:
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for surrogate in ("policy_gradient", name_of(reinforce)):
        algorithm = build(name="grpo", singleton="zero", surrogate=surrogate)
        ready, _ = compute_advantages(batch(), algorithm)
        ready = ready.replace(weights=token_weights(ready, algorithm))
        logprobs = (ready.logprobs - 0.1).requires_grad_()
        loss, metrics = policy_loss(logprobs, ready, algorithm)
        loss.backward()
        found.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(found[0], found[1])
    assert "clip_fraction" not in metrics


def unmasked(rewards: Any) -> Any:
    return rewards.sum(-1, keepdim=True).expand_as(rewards)


def in_order(rewards: Any, mask: Any) -> Any:
    return torch.where(mask, torch.arange(len(rewards)).double()[:, None], 0.0)


def writes(rewards: Any, mask: Any) -> Any:
    return torch.where(mask, rewards.mul_(2.0), 0.0)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (unmasked, "reads padding"),
        (in_order, "order of the episodes"),
        (writes, "wrote into its rewards"),
        (lambda rewards: rewards[:, :1], "floats of shape"),
        (lambda rewards: rewards / 0.0, "not finite"),
        (lambda rewards: 1.0, "as tensors"),
        (lambda reward: reward, "has an unknown argument 'reward'; did you mean 'rewards'"),
    ],
)
def test_bad_estimators_are_refused(part: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name=name_of(part))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda ratio, advantages: (-ratio * advantages).mean(), "the loss of every token"),
        (lambda ratio, advantages: -ratio * advantages.mean(), "mixes rows"),
        (lambda advantages: -advantages, "has no gradient"),
        (lambda ratio, advantages: -ratio * advantages.clamp(min=0), "gives no finite gradient"),
        (lambda ratio, advantages: ratio / 0.0 + advantages, "not finite"),
    ],
)
def test_bad_losses_are_refused(part: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(surrogate=name_of(part))


def test_names_lead_back_to_objects() -> None:
    for thing in (Coin, above_group, asyncio.Queue, lambda: 1, lambda: 2, Coin()):
        assert load_object(name_of(thing)) is thing
    assert name_of(above_group).endswith("python_parts.py:above_group")

    def cell() -> type:
        class Redefined:
            pass

        return Redefined

    first, second = cell(), cell()
    assert name_of(first) == name_of(second) == "python:Redefined"
    assert load_object("python:Redefined") is second
    with pytest.raises(UnknownNameError, match="put it into a file"):
        load_object("python:never-given")


def test_parts_are_registered_by_name_and_names_are_unique() -> None:
    register_part("algorithm", "test-above")(above_group)
    register_part("loss", "test-reinforce")(reinforce)
    register_part("shaper", "test-brevity")(brevity)
    config = turnwise.load_config(
        {"algo": {"name": "test-above", "surrogate": "test-reinforce"}},
        ["env.shaping.function=test-brevity"],
    )
    assert build_algorithm(config.algo).loss is reinforce
    assert find_shaper("test-brevity") is brevity
    with pytest.raises(ValueError, match=r"an algorithm named 'test-above' is registered already"):
        register_part("algorithm", "test-above")(unmasked)
    with pytest.raises(ValueError, match="a part is one of algorithm"):
        register_part("optimizer", "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="did you mean 'test-above'"):
        find_part("algorithm", "test-abov")
    with pytest.raises(ValueError, match=r"must be a subclass of turnwise\.Agent"):
        agent_class(name_of(Coin))


def test_a_shaper_that_fails_fails_its_episode_and_never_pays(tmp_path: Path) -> None:
    def nan(text: str) -> float:
        return float("nan")

    result = turnwise.evaluate
    with pytest.raises(Exception, match="the reward shaper: its result"):
        result(
            "random",
            Coin,
            episodes=2,
            config=SMALL,
            overrides={"env.shaping.function": name_of(nan)},
        )


class Wordy(ScriptedGenerator):
    async def generate(self, session: Any, new_ids: Any, sampling: Any) -> Completion:
        return Completion(ids=(1,) * 9, logprobs=(-1.0,) * 9, finish_reason="stop")


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (Wordy(lambda *_: [1]), "max_tokens is 4, and the completion has 9 ids"),
        (ScriptedGenerator(lambda *_: [10**6]), "ids are of the vocabulary"),
        (ScriptedGenerator(lambda *_: [1], logprob=0.5), "log-probs are finite and at most 0"),
        (object(), "has no policy_version"),
    ],
)
def test_bad_generators_are_refused(generator: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_generator(generator, tiny_tokenizer())


def test_a_loop_beside_a_running_one_passes_results_errors_and_cancellations() -> None:
    loop = EventLoop()

    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async def fail() -> None:
        raise KeyError("inside")

    async def outer() -> int:
        with pytest.raises(KeyError, match="inside"):
            loop.run(fail())
        found = loop.run(double(21))
        loop.close()
        return found

    assert asyncio.run(outer()) == 42


MINE = """
import torch
from python_parts import Coin, Counts, above_group, brevity, reinforce
from turnwise.generate.hf import HFGenerator

def make(model, tokenizer, config):
    return HFGenerator(model, tokenizer, slots=config.slots, max_context=config.max_context)
"""


def test_files_name_every_part_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    here = Path(__file__).parent
    (tmp_path / "mine.yaml").write_text(turnwise.show_config(turnwise.load_config(SMALL)))
    words = [
        "env.name=mine.py:Coin",
        "algo.name=mine.py:above_group",
        "algo.surrogate=mine.py:reinforce",
        "env.shaping.function=mine.py:brevity",
        "rollout.generator=mine.py:make",
        "log.callbacks=[mine.py:Counts]",
        "log.name=run",
    ]
    command = [*warm.turnwise(), "train", "mine.yaml", *words]
    path = f"{here.parents[1]}:{here}"
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**_environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    table = turnwise.rows(turnwise.RunReader(tmp_path / "runs/run").episodes(2))
    assert {row["reward/shaper"] for row in table} == {-0.25}


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_a_strangers_parts_are_named_and_not_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "episodes").mkdir(parents=True)
    tree = {
        "algo": {"name": "evil.py:a", "surrogate": "evil.py:b"},
        "env": {"name": "bandit", "shaping": {"function": "evil.py:c"}},
        "rollout": {"agent": "evil.py:D", "generator": "evil.py:e"},
        "log": {"callbacks": ("evil.py:F",)},
    }
    text = turnwise.show_config(turnwise.load_config(tree))
    (run / "config.yaml").write_text(text)
    calls = (
        turnwise.evaluate,
        lambda path: turnwise.train(resume=path),
        lambda path: turnwise.train(config=path / "config.yaml"),
        lambda path: turnwise.sft("expert", config=path / "config.yaml"),
    )
    for call in calls:
        with pytest.raises(ValueError, match="names code that would be loaded") as refused:
            call(run)
        for name in "abcDeF":
            assert f"evil.py:{name}" in str(refused.value)


def test_other_backends_refuse_own_parts() -> None:
    from turnwise.integrations.trl.mapping import refuse
    from turnwise.integrations.verl.config.settings import refusals

    config = turnwise.load_config(SMALL, ["rollout.generator=mine.py:make"])
    with pytest.raises(ValueError, match=r"rollout\.generator = 'mine.py:make' cannot be honoured"):
        refuse(config)
    assert refusals(config) == [
        "rollout.generator='mine.py:make': your own parts need backend native"
    ]
