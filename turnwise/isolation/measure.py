"""Where environments should run, by measurement: what is cheap stays in this process."""

import logging
import socket
import threading
import time
from collections.abc import Mapping

from turnwise.config.schema import EnvConfig, Isolation, RolloutConfig
from turnwise.envs.base import Env, EnvError, EnvFactory, SharedEnv, hint_of
from turnwise.envs.registry import is_ours, make_env
from turnwise.envs.wire import decode, encode, result_from_json
from turnwise.procs.channel import receive_frame, send_frame, start_beside
from turnwise.types import Json, Message

logger = logging.getLogger(__name__)
CHEAP_STEP_SECONDS = 0.002
MEASURED_STEPS = 5
IMPORT_SECONDS = 60.0
"""A fresh worker imports packages first."""
_known: dict[str, float] = {}
"""Seconds per call by config: what was measured in a worker is not measured again."""


def factory_of(config: EnvConfig) -> EnvFactory:
    return lambda: make_env(config)


def seconds_per_call(factory: EnvFactory) -> float:
    """Seconds that a reset and a few steps take on average, measured on an environment of their own.

    A first episode warms up, because imports and loaded files are paid once and not in every step.
    """
    env = factory()
    try:
        return [_play_a_little(env, seed) for seed in range(2)][-1]
    finally:
        env.close()


def choose_isolation(
    configs: Mapping[str, EnvConfig], rollout: RolloutConfig, *, factories: Mapping[str, EnvFactory]
) -> tuple[Isolation, dict[str, float]]:
    """(where these environments should run, milliseconds per call of each): inline where every one of them is cheap,
    else in worker processes; in threads where they are objects, which cannot move, or wait for another machine.

    turnwise's own environments and objects are measured in this process, all others in a worker: one that hangs or
    ends its process there takes nothing else with it.
    """
    kind: Isolation = "inline"
    measured: dict[str, float] = {}
    for tag, config in configs.items():
        factory = factories.get(tag) or factory_of(config)
        moves = tag not in factories
        try:
            if tag in factories or is_ours(config.name):
                limit = rollout.reset_timeout + MEASURED_STEPS * rollout.step_timeout
                seconds, shared = _measure_here(factory, limit=limit)
                moves = moves and not shared
            else:
                seconds = _measure_in_worker(config, rollout)
        except Exception as error:  # an environment that fails here fails in its episode, where it is counted
            logger.warning("could not measure %s: %s: %s", tag, type(error).__name__, error)
            continue
        measured[tag] = seconds * 1e3
        if seconds > CHEAP_STEP_SECONDS and kind != "process":
            kind = "process" if moves else "thread"
    shown = ", ".join(f"{tag} {ms:.2f} ms" for tag, ms in measured.items())
    logger.info("environments run in isolation %s, measured per call: %s", kind, shown or "nothing")
    return kind, measured


def _play_a_little(env: Env, seed: int) -> float:
    started = time.perf_counter()
    env.reset(env.make_task(seed, "train"), 0)
    calls = 1
    for number in range(MEASURED_STEPS):
        reply = hint_of(env, "random", number) or "nothing"
        calls += 1
        if env.step(Message(role="assistant", content=reply)).done:
            break
    return (time.perf_counter() - started) / calls


def _measure_here(factory: EnvFactory, *, limit: float) -> tuple[float, bool]:
    """(seconds per call, whether the environment only talks to another machine). Infinite where it hangs."""
    found: list[tuple[float, bool] | Exception] = []

    def run() -> None:
        try:
            probe = factory()
            probe.close()
            found.append((seconds_per_call(factory), isinstance(probe, SharedEnv)))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="turnwise-measure", daemon=True)
    thread.start()
    thread.join(limit)
    if not found:
        return float("inf"), False
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _measure_in_worker(config: EnvConfig, rollout: RolloutConfig) -> float:
    """Seconds per call, infinite where the environment hangs or takes the worker down.

    Raises:
        EnvError: it failed.
    """
    key = config.model_dump_json()
    if key not in _known:
        process, sock = start_beside("turnwise.isolation.worker", str(rollout.worker_memory_mb or 0))
        try:
            _known[key] = _drive(sock, config, rollout)
        except _LostError:
            return float("inf")
        finally:
            process.kill()
            process.wait()
            sock.close()
    return _known[key]


class _LostError(Exception):
    """The worker died, or did not answer in time."""


def _drive(sock: socket.socket, config: EnvConfig, rollout: RolloutConfig) -> float:
    """Plays two short episodes in a worker; the mean seconds per call of the second."""

    def ask(op: str, limit: float, **body: Json) -> Json:
        sock.settimeout(limit)
        send_frame(sock, encode({"op": op, "id": 0, **body}))
        answer = receive_frame(sock)
        if answer is None:
            raise _LostError
        result = decode(answer)
        if "error" in result:
            raise EnvError(result["error"])
        return result["ok"]

    seconds = 0.0
    probe = make_env(config)
    ask("open", IMPORT_SECONDS + rollout.reset_timeout, config=config.model_dump(mode="json"))
    for episode in range(2):
        task = probe.make_task(episode, "train").to_json()
        started, calls = time.perf_counter(), 1
        ask("reset", rollout.reset_timeout, task=task, noise_seed=0)
        for number in range(MEASURED_STEPS):
            reply = ask("hint", rollout.step_timeout, what="random", seed=number) or "nothing"
            message = Message(role="assistant", content=reply)
            result = result_from_json(ask("step", rollout.step_timeout, message=message.to_json()))
            calls += 1
            if result.done:
                break
        seconds = (time.perf_counter() - started) / calls
    probe.close()
    return seconds
