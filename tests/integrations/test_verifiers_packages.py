"""Packages of verifiers 0.4: their own Env, harness, hooks and toolsets; what is refused."""

import logging
from pathlib import Path

import pytest

vf = pytest.importorskip("verifiers.v1")

import vf_counter  # noqa: E402
import vf_duel  # noqa: E402
import vf_notes  # noqa: E402

from turnwise.envs.base import EnvError  # noqa: E402
from turnwise.integrations.trl.detect import examine  # noqa: E402
from turnwise.integrations.trl.seats import seat_advantages  # noqa: E402
from turnwise.integrations.trl.sources import make_source  # noqa: E402
from turnwise.integrations.verifiers.environments import TasksetEnv  # noqa: E402
from turnwise.types import Message  # noqa: E402

pytestmark = pytest.mark.timeout(240)
CONFIG = vf.TasksetConfig()
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


def begin(env, number=0):
    """(the environment after its reset, its opening)."""
    source = make_source(env)
    playing = source.factory()
    return playing, playing.reset(source.task("train", number))


def say(env, text):
    return env.step(Message(role="assistant", content=text))


def texts(messages):
    return [message.content for message in messages]


def duel(**settings):
    config = vf_duel.DuelConfig(taskset=vf.TasksetConfig(id="vf_duel"), **settings)
    return vf_duel.DuelEnv(config)


# Env.run of the package.


def test_the_env_of_the_package_drives_the_episode():
    env, opening = begin(vf_duel.DuelTaskset(CONFIG))
    assert texts(opening.messages) == ["Duel 0."]
    first = say(env, "b")
    assert first.info == {"seat": "left", "trace": 0}
    assert texts(first.rewritten.messages) == ["You are right.", "Left said 'b'."]
    last = say(env, "a")
    assert last.terminated
    assert last.info["seats"] == [
        {"seat": "left", "trace": 0, "reward": 1.0, "trained": True},
        {"seat": "right", "trace": 1, "reward": -1.0, "trained": True},
    ]
    assert last.info["metrics"] == {"left/points": 98.0}


def test_a_view_of_the_taskset_is_kept():
    source = make_source(vf_duel.DuelTaskset(CONFIG).skip(1).take(2))
    assert source.length("train") == 2
    assert texts(source.factory().reset(source.task("train", 0)).messages) == ["Duel 1."]


def test_an_env_with_settings_of_its_own():
    assert examine(duel()).multi_turn
    env, _ = begin(duel(judged=True))
    say(env, "b")
    third = say(env, "a")
    assert texts(third.rewritten.messages) == ["Who won?"]
    seats = say(env, "left").info["seats"]
    assert [(seat["seat"], seat["trained"]) for seat in seats] == [
        ("left", True),
        ("right", True),
        ("referee", False),
    ]


def test_a_user_beside_an_env_that_drives_the_conversation():
    with pytest.raises(EnvError, match="DuelEnv drives the conversation of DuelTaskset"):
        make_source(TasksetEnv(vf_duel.DuelTaskset(CONFIG), user=lambda messages, data: None))


def test_a_model_that_nobody_serves():
    env = duel(right=vf.AgentConfig(harness={"id": "null"}, model="gpt-9"))
    with pytest.raises(EnvError, match="agent 'right' is played by the model 'gpt-9'"):
        make_source(env)


def test_every_agent_is_credited_with_its_own_reward(tmp_path):
    pytest.importorskip("trl")
    from trl_parts import make_trainer

    from turnwise.integrations.trl import VerifiersGRPOTrainer

    class Keeps(VerifiersGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.kept = [
                (row.episode, int(max(row.sample.turn_ids)), float(advantage))
                for row, advantage in zip(
                    self._all_rows, output["advantages"] / self._row_weights, strict=True
                )
            ]
            return output

    trainer = make_trainer(
        tmp_path, duel(judged=True), cls=Keeps, max_steps=1, max_completion_length=400,
        scale_rewards="none",
    )  # fmt: skip
    trainer.train()
    trainer.close()
    groups: dict[int, list[float]] = {}
    episodes = {episode.id: episode for episode, _, _ in trainer.kept}
    for episode in episodes.values():
        groups.setdefault(episode.group_id, []).append(gain(episode))
    assert len(groups) == 2
    assert any(len(set(gains)) > 1 for gains in groups.values())
    assert len(trainer.kept) == 3 * len(episodes)
    for episode, turn, advantage in trainer.kept:
        gains = groups[episode.group_id]
        centred = gain(episode) - sum(gains) / len(gains)
        expected = (centred, -centred, 0.0)[turn]
        assert advantage == pytest.approx(expected, abs=1e-3)


def gain(episode):
    left, right = (vf_duel.points(turn.text.strip()) for turn in episode.turns[:2])
    return left - right


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"beta": 0.1}, "Set beta=0"), ({"credit": "turn_level"}, "credit 'turn_level'")],
)
def test_what_takes_an_episode_as_a_whole(tmp_path, settings, named):
    pytest.importorskip("trl")
    from trl_parts import make_trainer

    from turnwise.testing.tiny import tiny_model

    model = tiny_model()
    model.save_pretrained(tmp_path / "model")  # beta needs a model that can be loaded again
    model.config._name_or_path = str(tmp_path / "model")
    trainer = make_trainer(
        tmp_path, duel(), model=model, max_steps=1, max_completion_length=400, **settings
    )
    with pytest.raises(ValueError, match=named):
        trainer.train()
    trainer.close()


def test_advantages_of_seats_by_hand():
    from dataclasses import replace

    from turnwise.integrations.trl.credit import earlier_rows, train_row
    from turnwise.types import Completion, Episode, Status, Task, Turn

    done = Completion(ids=(5,), logprobs=(0.0,), finish_reason="stop")

    def episode(name, left, right, spoke=(0, 1)):
        seats = [
            {"seat": "left", "trace": 0, "reward": left, "trained": True},
            {"seat": "right", "trace": 1, "reward": right, "trained": True},
        ]
        turns = [
            Turn(
                prompt_ids=(1,), completion=done, text="", restart=True,
                info={"trace": trace, "seat": ("left", "right")[trace]},
            )
            for trace in spoke
        ]  # fmt: skip
        turns[-1] = replace(turns[-1], info={**turns[-1].info, "seats": seats})
        return Episode(
            id=name, task=Task(id="t", seed=0), group_id=0, index=0, tag="", seed=0, noise_seed=0,
            prompt=(), turns=tuple(turns), status=Status.COMPLETED,
        )  # fmt: skip

    # The third episode's right never spoke: its 9 is in no baseline.
    played = [episode("a", 1.0, 0.0), episode("b", 3.0, 4.0), episode("c", 5.0, 9.0, spoke=(0,))]
    rows = [row for e in played for row in (*earlier_rows(e), train_row(e, eos_id=0))]
    assert seat_advantages(rows, played, scale="none") == [-2.0, -2.0, 0.0, 2.0, 2.0]
    scaled = seat_advantages(rows, played, scale="group")
    assert scaled == pytest.approx([-1.0, -0.7071, 0.0, 0.7071, 1.0], abs=1e-3)


# Harness, hooks and tools.


def test_the_harness_of_the_package_is_used():
    env, opening = begin(vf_notes.NotesTaskset(vf.TasksetConfig(id="vf_notes")))
    assert texts(opening.messages) == ["Begin."]
    assert texts(say(env, "two eggs").rewritten.messages) == ["You noted 'two eggs'."]
    assert say(env, "end").reward == 1.0


def test_a_loop_in_place_of_the_harness():
    taskset = vf_notes.NotesTaskset(vf.TasksetConfig(id="vf_notes"))
    env, _ = begin(TasksetEnv(taskset, harness="chat"))
    assert say(env, "end").terminated


class Guarded(vf.Task):
    @vf.intercept
    def hide(self, response: vf.Response) -> vf.Response | None:
        if "secret" in (response.message.content or ""):
            return response.model_copy(update={"message": vf.AssistantMessage(content="(hidden)")})
        return None

    @vf.intercept
    def deny(self, request: vf.Request) -> vf.Request | None:
        last = request.messages[-1]
        if not isinstance(last, vf.ToolMessage) or last.content:
            return None
        denied = last.model_copy(update={"content": "not here"})
        return request.model_copy(update={"messages": [*request.messages[:-1], denied]})

    @vf.reward
    async def tools(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class Guards(vf.Taskset[Guarded]):
    def load(self):
        return [Guarded(vf.TaskData(prompt="Begin."), self.config.task)]


def test_a_reply_that_a_hook_rewrote_is_a_new_context():
    env, _ = begin(TasksetEnv(Guards(CONFIG), user=lambda messages, data: "And?"))
    assert texts(say(env, "the secret").rewritten.messages) == ["Begin.", "(hidden)", "And?"]
    assert say(env, "fine").rewritten is None


def test_a_call_that_a_hook_denied_is_not_run():
    ran = []

    def look(place: str) -> str:
        """Looks."""
        ran.append(place)
        return "nothing"

    env, _ = begin(TasksetEnv(Guards(CONFIG), tools=[look]))
    assert texts(say(env, CALL % ("look", '{"place": "x"}')).messages) == ["not here"]
    assert ran == []


class Plain(vf.Task):
    @vf.reward
    async def there(self, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["test", "-e", "made"], {})).exit_code == 0)


class PlainSet(vf.Taskset[Plain]):
    prompt: object = "Begin."
    image: str | None = None

    def load(self):
        return [Plain(vf.TaskData(prompt=self.prompt, image=self.image), self.config.task)]


def test_a_shell_for_those_who_ask(caplog):
    with caplog.at_level(logging.WARNING):
        env, opening = begin(TasksetEnv(PlainSet(CONFIG), harness="bash"))
    assert "shell" not in caplog.text
    assert opening.tools[0]["function"]["name"] == "bash"
    assert texts(say(env, CALL % ("bash", '{"command": "touch made; echo ok"}')).messages) == [
        "ok\n"
    ]
    assert say(env, "done").reward == 1.0


def test_without_one_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        env, opening = begin(PlainSet(CONFIG))
    assert "PlainSet: verifiers' default harness would give the model a shell" in caplog.text
    assert opening.tools == ()
    assert say(env, "done").reward == 0.0


@pytest.mark.slow  # each server imports verifiers in a process of its own
def test_toolsets_run_as_servers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    source = make_source(vf_counter.CounterTaskset(CONFIG))
    env = source.factory()
    opening = env.reset(source.task("train", 0))
    names = [tool["function"]["name"] for tool in opening.tools]
    assert names == ["shelf_size", "pad_note"]
    assert texts(say(env, CALL % ("shelf_size", '{"name": "Ada"}')).messages) == ["3"]
    both = CALL % ("pad_note", '{"text": "a"}') + CALL % ("pad_note", '{"text": "b"}')
    assert texts(say(env, both).messages) == ["a", "a, b"]
    (answer,) = say(env, CALL % ("pad_note", '{"wrong": 1}')).messages
    assert "text" in answer.content
    assert say(env, "done").reward == 4.0
    env.close()
    assert source.close is not None
    source.close()


# What is refused at construction.


def picture():
    source = vf.ImageUrlSource(url="data:image/png;base64,AA==")
    return [vf.UserMessage(content=[vf.ImageUrlContentPart(image_url=source)])]


def test_images_are_refused():
    taskset = PlainSet(CONFIG)
    taskset.prompt = picture()
    with pytest.raises(EnvError, match=r"PlainSet: task 0: .* part of type 'image_url'"):
        make_source(taskset)


def test_images_that_come_later_end_the_episode():
    class Shows(vf.SingleAgentEnv):
        async def run(self, task, agents):
            async with agents.agent.interaction(task) as talk:
                await talk.turn()
                await talk.turn(picture())

    env = Shows(vf.SingleAgentEnvConfig(taskset=vf.TasksetConfig(id="vf_duel")))
    playing, _ = begin(env)
    with pytest.raises(EnvError, match="part of type 'image_url'"):
        say(playing, "a")


def test_tasks_in_containers_are_refused():
    taskset = PlainSet(CONFIG)
    taskset.image = "ubuntu:24.04"
    with pytest.raises(EnvError, match=r"PlainSet cannot be played here: .*requires image"):
        make_source(taskset)


def test_harnesses_in_containers_are_refused(monkeypatch):
    monkeypatch.setattr(vf_notes.NotesHarness, "NEEDS_CONTAINER", True)
    with pytest.raises(EnvError, match="needs a container"):
        make_source(vf_notes.NotesTaskset(vf.TasksetConfig(id="vf_notes")))


def test_a_harness_that_is_no_choice():
    with pytest.raises(ValueError, match="harness is None, 'chat' or 'bash', got 'codex'"):
        TasksetEnv(PlainSet(CONFIG), harness="codex")
