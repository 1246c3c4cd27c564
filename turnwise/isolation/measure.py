"""Chooses where environments run, by measurement: cheap ones stay in this process."""

import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping

from turnwise.config.schema import EnvConfig, Isolation, RolloutConfig
from turnwise.envs.base import Env, EnvError, EnvFactory, EnvTimeoutError, hint_of
from turnwise.envs.gate import admit_task, ask_within, close_quietly
from turnwise.envs.registry import is_ours, is_remote, make_env
from turnwise.envs.wire import decode, encode, result_from_json
from turnwise.procs.channel import receive_frame, send_frame, start_beside, stop
from turnwise.procs.progress import Progress
from turnwise.procs.threads import SideThread
from turnwise.types import Json, Message

logger = logging.getLogger(__name__)
CHEAP_STEP_SECONDS = 0.002
MEASURED_STEPS = 5
IMPORT_SECONDS = 60.0
"""Time limit for the imports of a new worker."""
_known: dict[str, float] = {}
"""Seconds per call by config: a cache of measurements in workers."""


def factory_of(config: EnvConfig) -> EnvFactory:
    return lambda: make_env(config)


def seconds_per_call(factory: EnvFactory) -> float:
    """Mean seconds of a reset and a few steps, measured on a separate environment."""
    env = factory()
    try:
        return least(lambda episode: _play_a_little(env, episode))
    finally:
        close_quietly(env)


def least(play: Callable[[int], float]) -> float:
    """Seconds per call, from a function that plays an episode and returns its seconds per call.

    The first episode is a warm-up: imports and file loading happen only once. Near the bound the
    least of a few episodes counts: a busy machine only makes calls slower.

    Example:
        >>> times = iter([0.5, 0.003, 0.001])
        >>> least(lambda episode: next(times))
        0.001
    """
    play(0)
    seconds = play(1)
    for episode in range(2, 5):
        if not CHEAP_STEP_SECONDS < seconds < 10 * CHEAP_STEP_SECONDS:
            break
        seconds = min(seconds, play(episode))
    return seconds


def choose_isolation(
    configs: Mapping[str, EnvConfig], rollout: RolloutConfig, *, factories: Mapping[str, EnvFactory]
) -> tuple[Isolation, dict[str, float]]:
    """(where these environments should run, milliseconds per call of each). Inline if all are
    cheap, else in worker processes. In threads if they are objects, which cannot move to a process,
    or wait for another machine.

    turnwise's own environments, objects and remote environments are measured in this process, all
    others in a worker, where a hang or a crash does no harm.
    """
    kind: Isolation = "inline"
    measured: dict[str, float] = {}
    for tag, config in configs.items():
        factory = factories.get(tag) or factory_of(config)
        moves = tag not in factories and not is_remote(config.name)
        try:
            with Progress(f"measuring how long a step of {tag} takes"):
                if not moves or is_ours(config.name):
                    limit = rollout.reset_timeout + MEASURED_STEPS * rollout.step_timeout
                    seconds = _measure_here(factory, limit=limit)
                else:
                    seconds = _measure_in_worker(config, rollout)
        except Exception as error:  # it will fail in its episode too, which counts the failure
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


def _measure_here(factory: EnvFactory, *, limit: float) -> float:
    """Seconds per call; infinite if the environment hangs.

    Raises:
        EnvError: the environment failed.
    """
    beside = SideThread("turnwise-measure")
    try:
        return ask_within(
            "a short episode", lambda: seconds_per_call(factory), thread=beside, limit=limit
        )
    except EnvTimeoutError:
        return float("inf")


def _measure_in_worker(config: EnvConfig, rollout: RolloutConfig) -> float:
    """Seconds per call; infinite if the environment hangs or crashes the worker.

    Raises:
        EnvError: the environment failed.
    """
    key = config.model_dump_json()
    if key not in _known:
        process, sock = start_beside(
            "turnwise.isolation.worker", str(rollout.worker_memory_mb or 0)
        )
        try:
            _known[key] = _drive(sock, config, rollout)
        except _LostError:
            return float("inf")
        finally:
            stop(process)
            sock.close()
    return _known[key]


class _LostError(Exception):
    """The worker died, or did not answer in time."""


def _drive(sock: socket.socket, config: EnvConfig, rollout: RolloutConfig) -> float:
    """Plays short episodes in a worker; the seconds per call that `least` finds."""

    numbers = itertools.count(1)
    beside = SideThread("turnwise-measure")

    def ask(op: str, limit: float, **body: Json) -> Json:
        sock.settimeout(limit)
        number = next(numbers)
        send_frame(sock, encode({"op": op, "id": 0, "n": number, **body}))
        answer = receive_frame(sock)
        if answer is None:
            raise _LostError
        result = decode(answer)
        if result.get("n") != number:
            raise _LostError
        if "error" in result:
            raise EnvError(result["error"])
        return result["ok"]

    def play(episode: int) -> float:
        made = ask_within(
            f"{config.name}: make_task",
            lambda: admit_task(probe.make_task(episode, "train"), name=config.name),
            thread=beside,
            limit=rollout.reset_timeout,
        )
        task = made.to_json()
        started, calls = time.perf_counter(), 1
        ask("reset", rollout.reset_timeout, task=task, noise_seed=0)
        for number in range(MEASURED_STEPS):
            reply = ask("hint", rollout.step_timeout, what="random", seed=number) or "nothing"
            message = Message(role="assistant", content=reply)
            result = result_from_json(ask("step", rollout.step_timeout, message=message.to_json()))
            calls += 1
            if result.done:
                break
        return (time.perf_counter() - started) / calls

    probe = make_env(config)
    ask("open", IMPORT_SECONDS + rollout.reset_timeout, config=config.model_dump(mode="json"))
    try:
        return least(play)
    except EnvTimeoutError:
        raise _LostError from None
    finally:
        close_quietly(probe, thread=beside, limit=rollout.reset_timeout)
