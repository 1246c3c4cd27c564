"""Players: other processes play the episodes, and nobody can tell from the result, whatever happens to them."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.config.schema import Config, EnvConfig, FormatConfig, GroupsConfig, RolloutConfig, TrainConfig
from turnwise.generate.base import Sampling, Session
from turnwise.generate.hf import HFGenerator
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.agents import Agent, register_agent
from turnwise.rollout.channel import Channel
from turnwise.rollout.proxy import AgentProxy, RolloutError, RolloutResult
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.types import Status


def config_for(players: int, *, options: dict[str, Any], **rollout: Any) -> Config:
    env = EnvConfig(
        name="turnwise.testing.faulty:FaultyEnv", options=options, format=FormatConfig(style="raw"), system_prompt="Go."
    )
    shape: dict[str, Any] = {
        "players": players,
        "train": GroupsConfig(env_groups=5, group_size=2),
        "max_response_tokens": 6,
        "slots": 4,
        "isolation": "inline",
        **rollout,
    }
    return Config(env=env, rollout=RolloutConfig(**shape), train=TrainConfig(max_turn=3))


def proxy_for(players: int, *, options: dict[str, Any] | None = None, **rollout: Any) -> AgentProxy:
    tokenizer = tiny_tokenizer()
    generator = HFGenerator(tiny_model(), tokenizer, slots=4, max_context=400)
    return AgentProxy(config_for(players, options=options or {"share": 0.0}, **rollout), generator, tokenizer)


def facts(result: RolloutResult) -> list[Any]:
    """Everything about episodes but how long things took."""
    return [
        (
            *(e.id, e.task, e.group_id, e.index, e.seed, e.noise_seed, e.prompt, e.status, e.final_ids, e.attempts),
            *((t.prompt_ids, t.completion, t.text, t.restart, t.action, t.messages, t.reward, t.info) for t in e.turns),
        )
        for e in result.episodes
    ]


def players_of(pid: int) -> list[int]:
    found = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in found if "turnwise.rollout.player" in " ".join(child.cmdline())]


@pytest.mark.timeout(120)
def test_whoever_plays_the_episodes_are_the_same(tmp_path: Path) -> None:
    """With contexts that begin anew, and environments that raise at a first try."""
    found: list[list[Any]] = []
    for players in (0, 2):
        marks = tmp_path / str(players)
        marks.mkdir()
        options = {"share": 0.3, "faults": ["raise"], "marks": str(marks)}
        with closing(proxy_for(players, options=options, window="last_k", window_turns=1)) as proxy:
            found.append([facts(proxy.play(step)) for step in (0, 1)])
            assert proxy.env_state.num_resets == 2
            assert proxy.generator.open_sessions == ()
            assert len(players_of(os.getpid())) == players
        assert len(list(marks.iterdir())) >= 2, "no fault happened: the test shows nothing"
    assert found[0] == found[1]
    assert len(found[0][0]) == 10
    assert players_of(os.getpid()) == []


@pytest.mark.timeout(120)
def test_a_turn_that_its_episodes_end_changed_is_told_anew() -> None:
    """A context that is full ends an episode whose turns were told, and what the environment then pays is in the last
    of them."""
    parts = Path(__file__).parents[1] / "unit" / "rollout_parts.py"
    found: list[list[Any]] = []
    for players in (0, 1):
        config = config_for(players, options={"share": 0.0}, max_context=110)
        config = config.model_copy(update={"env": EnvConfig(name=f"{parts}:CountEnv")})
        tokenizer = tiny_tokenizer()
        generator = HFGenerator(tiny_model(), tokenizer, slots=4, max_context=400)
        with closing(AgentProxy(config, generator, tokenizer)) as proxy:
            result = proxy.play(0)
        cut = [e for e in result.episodes if e.status is Status.TRUNCATED_LENGTH and e.turns[-1].reward_parts["finish"]]
        assert any(len(episode.turns) > 1 for episode in cut), "none was cut after a turn: the test shows nothing"
        found.append(facts(result))
    assert found[0] == found[1]


def played_in_one_process(*steps: int) -> list[list[Any]]:
    with closing(proxy_for(0)) as proxy:
        return [facts(proxy.play(step)) for step in steps]


@pytest.mark.timeout(180)
def test_a_player_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    options = {"share": 0.3, "faults": ["kill"], "marks": str(tmp_path)}
    with closing(proxy_for(2, options=options, retries=9)) as proxy:
        before = proxy._players.pids
        assert [facts(proxy.play(step)) for step in (0, 1)] == played_in_one_process(0, 1)
        assert len(list(tmp_path.iterdir())) >= 2, "nobody died: the test shows nothing"
        assert proxy._players.pids != before
        assert proxy.generator.open_sessions == ()


@pytest.mark.timeout(180)
def test_players_that_die_again_and_again_cost_their_episodes_alone(caplog: pytest.LogCaptureFixture) -> None:
    with closing(proxy_for(5, options={"share": 0.3, "faults": ["kill"]}, min_group_size=1)) as proxy:
        result = proxy.play(1)
        assert result.dropped, "nobody died: the test shows nothing"
        assert len(result.episodes) + len(result.dropped) == 10
        assert {episode.status for episode in result.dropped} == {Status.ENV_ERROR}
        assert "a process that plays episodes died (exit -9)" in (result.dropped[0].error or "")
        assert "another goes on" in caplog.text
        assert "its episodes are lost" in caplog.text
        assert proxy.generator.open_sessions == ()
    with (
        closing(proxy_for(1, options={"share": 1.0, "faults": ["kill"]}, retries=0)) as proxy,
        pytest.raises(RolloutError, match=r"none of the 10 episodes .* died \(exit -9\)"),
    ):
        proxy.play(1)


@pytest.mark.timeout(180)
def test_a_rollout_that_is_given_up_leaves_no_session_and_is_played_again(tmp_path: Path) -> None:
    options = {"share": 0.3, "faults": ["hang"], "marks": str(tmp_path)}
    with closing(proxy_for(1, options=options)) as proxy:

        async def until_one_hangs() -> RolloutResult | None:
            hung = len(list(tmp_path.iterdir()))
            rollout = asyncio.create_task(proxy.rollout(1))
            while not rollout.done() and len(list(tmp_path.iterdir())) == hung:
                await asyncio.sleep(0.05)
            if rollout.done():
                return rollout.result()
            rollout.cancel()
            await asyncio.wait([rollout])
            assert rollout.cancelled()
            assert proxy.generator.open_sessions == ()
            return None

        tries = 1
        while (result := asyncio.run(until_one_hangs())) is None:  # every time on another event loop
            tries += 1
        assert tries > 1, "nobody hung: the test shows nothing"
        assert [facts(result)] == played_in_one_process(1)


def test_what_cannot_be_played_elsewhere_is_refused() -> None:
    tokenizer, config = tiny_tokenizer(), config_for(2, options={"share": 0.0})
    scripted = ScriptedGenerator(lambda session, ids, call: "go", tokenizer=tokenizer, end_id=tokenizer.eos_token_id)
    with pytest.raises(ValueError, match=r"rollout.players"):
        AgentProxy(config, scripted, tokenizer)
    generator = HFGenerator(tiny_model(), tokenizer, slots=4, max_context=400)
    tokenizer.not_to_be_sent = lambda: None
    with pytest.raises(ValueError, match=r"rollout.players needs a tokenizer"):
        AgentProxy(config, generator, tokenizer)
    assert players_of(os.getpid()) == []


def test_environments_with_processes_of_their_own_need_no_players(caplog: pytest.LogCaptureFixture) -> None:
    with closing(proxy_for(2, isolation="process", num_workers=1)) as proxy:
        assert "rollout.players is not used" in caplog.text
        assert len(proxy.play(0).episodes) == 10
        assert players_of(os.getpid()) == []


@pytest.mark.timeout(60)
def test_a_player_that_cannot_begin_says_why() -> None:
    register_agent("known-here-alone")(type("KnownHere", (Agent,), {}))
    with (
        closing(proxy_for(1, agent="known-here-alone")) as proxy,
        pytest.raises(RolloutError, match="no agent is registered as 'known-here-alone'"),
    ):
        proxy.play(0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", [0.0, 0.1, 1.0])
def test_players_die_with_a_parent_that_was_killed(moment: float) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_players as t\n"
        "proxy = t.proxy_for(2, options={'share': 1.0, 'faults': ['hang']})\n"
        "print(*proxy._players.pids, flush=True)\n"
        "proxy.play(0)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(moment)  # still starting, importing, or playing, as it happens
        os.kill(parent.pid, signal.SIGKILL)
    while any(map(psutil.pid_exists, pids)):  # until the test's own time is over
        time.sleep(0.05)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=400_000), max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_channel_hands_over_everything_in_order_on_any_loop(data: list[bytes], attached: list[bool]) -> None:
    """What fills the socket is kept, what is sent on no loop waits for the next, and the end comes last."""
    ours, theirs = socket.socketpair()
    heard: list[Any] = []
    there = Channel(theirs, received=lambda frame: heard.append(pickle.loads(frame)), ended=lambda: heard.append("end"))
    here = Channel(ours, received=heard.append, ended=lambda: None)

    async def send(item: bytes, *, on_loop: bool) -> None:
        if on_loop:
            here.attach(asyncio.get_running_loop())
            there.attach(asyncio.get_running_loop())
        here.send(item)
        await asyncio.sleep(0)
        here.detach()
        there.detach()

    async def rest() -> None:
        here.attach(asyncio.get_running_loop())
        there.attach(asyncio.get_running_loop())
        async with asyncio.timeout(10):
            while len(heard) < len(data):
                await asyncio.sleep(0)
            here.close()
            while "end" not in heard:
                await asyncio.sleep(0)

    for item, on_loop in zip(data, attached, strict=False):
        asyncio.run(send(item, on_loop=on_loop))
    asyncio.run(rest())
    assert heard == [*data, "end"]
    there.close()


def test_a_submitted_request_is_like_a_generated_one() -> None:
    expected_of = HFGenerator(tiny_model(), tiny_tokenizer(), slots=2, max_context=60)
    generator = HFGenerator(tiny_model(), tiny_tokenizer(), slots=2, max_context=60)
    sessions, sampling = [Session(key=str(seed), seed=seed) for seed in range(3)], Sampling(max_tokens=5)

    async def run() -> None:
        for new_ids in ([1, 2, 3], [4]):
            asked = [generator.submit(session, new_ids, sampling) for session in sessions]
            assert [await future for future in asked] == [
                await expected_of.generate(session, new_ids, sampling) for session in sessions
            ]
        open_one = generator.submit(sessions[0], [5], sampling)
        for session in sessions:
            generator.forget(session)
        assert isinstance(open_one.exception(), Exception)

    asyncio.run(run())
    assert generator.open_sessions == ()
