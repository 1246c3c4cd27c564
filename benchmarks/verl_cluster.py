"""Episodes per second of the verl backend's agent loop workers on a simulated cluster.

    python benchmarks/verl_cluster.py
    python benchmarks/verl_cluster.py --workers 1 4 --groups 8

Starts Ray on this machine with 16 logical GPUs. On each is a scripted engine: a Ray actor that
answers with the same reply after a fixed time. The environment sleeps as well. The agent loop
workers, the way in which groups are handed out, and the queue that collects the rows are those of a
run; nothing is trained. All workers are started once, and each row of the table uses the first of
them.

Everything waits most of the time, so that the few cores of one machine can stand for many. `cores`
is how many of them the driver, Ray, the engines and the workers kept busy: the figures mean
something only while that is well below the number of cores.
"""

import argparse
import asyncio
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from turnwise.envs.base import BaseEnv

GPUS = 16
TURNS = 2
POLL_SECONDS = 0.05


class Sleeper(BaseEnv):
    """Every step takes `seconds`, spent waiting."""

    instruction = "Say something."

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        return "on", 1.0, False, {}


class ScriptedServer:
    """An engine that takes `seconds` for the same reply to everything."""

    def __init__(self, ids: Sequence[int], seconds: float) -> None:
        self._ids, self._seconds = list(ids), seconds

    async def generate(self) -> list[int]:
        await asyncio.sleep(self._seconds)
        return self._ids


class ScriptedClient:
    """verl's client of rollout servers, as far as agent loops use it. A sequence stays on one
    server."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = list(servers)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        server = self._servers[int(request_id, 16) % len(self._servers)]
        ids = await server.generate.remote()
        return TokenOutput(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": 0},
        )


def make_config(folder: Path, options: argparse.Namespace) -> tuple[Any, list[int]]:
    """(verl's config with section turnwise, the ids of the engines' reply)."""
    from turnwise.integrations.verl.config.placement import Placement
    from turnwise.integrations.verl.config.resolve import resolve
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tiny_model("qwen2").save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "tiny")},
        "env": {
            "name": f"{Path(__file__).resolve()}:Sleeper",
            "options": {"seconds": options.env_seconds},
            "max_turn": TURNS,
            "format": {"style": "raw"},
        },
        "rollout": {
            "train": {"env_groups": options.groups, "group_size": options.group_size},
            "max_context": 512,
            "isolation": "thread",
            "num_workers": options.threads,
        },
        "train": {"device": "cpu"},
        "log": {"dir": str(folder / "runs"), "report": False, "episodes_every": 0},
        "backend": "verl",
        "verl": {"actor_rollout_ref.rollout.agent.num_workers": max(options.workers)},
    }
    config, _, recorder = resolve(
        tree, factories={}, placement=Placement(nodes=1, gpus=GPUS, device="cpu")
    )
    recorder.close()
    return config, tokenizer.encode("go<|im_end|>")


def start(config: Any, ids: Sequence[int], options: argparse.Namespace) -> Any:
    """The manager of the agent loop workers, with an engine on every logical GPU."""
    import ray
    import transfer_queue as tq

    from turnwise.integrations.verl.faults.cluster import give_workers, worker_environment
    from turnwise.integrations.verl.rollout.spread import SpreadManager

    server: Any = ray.remote(num_gpus=1, num_cpus=0)(ScriptedServer)
    servers = [server.remote(ids, options.reply_seconds) for _ in range(GPUS)]
    with give_workers(worker_environment(device="cpu")):
        tq.init(config.transfer_queue)
        return SpreadManager.create(
            config=config,
            llm_client=ScriptedClient(servers),
            teacher_client=None,
            reward_loop_worker_handles=None,
        )


def play(manager: Any, groups: int) -> float:
    """Seconds from handing out the groups until all are over."""
    import numpy as np
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    from turnwise.integrations.verl.rollout.dataset import EnvDataset

    rows = EnvDataset("train", max_samples=groups)
    columns = collate_fn([rows[number] for number in range(groups)])
    uids = [str(uuid4()) for _ in range(groups)]
    columns["uid"] = np.array(uids, dtype=object)
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    tag = {"is_prompt": True, "status": "pending", "global_steps": 1}
    tq.kv_batch_put(keys=uids, partition_id="train", tags=[dict(tag) for _ in uids])
    started = time.perf_counter()
    manager.generate_sequences(batch)
    while True:
        there = tq.kv_list("train")["train"]
        states = [there[uid]["status"] for uid in uids]
        if "failure" in states:
            raise SystemExit("an episode failed; see the agent loop workers' log")
        if all(state == "finished" for state in states):
            break
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - started
    tq.kv_clear(keys=list(there), partition_id="train")
    return seconds


def use(manager: Any, workers: Sequence[Any]) -> None:
    """Lets the manager hand out groups to these workers only."""
    import ray

    manager.agent_loop_workers = list(workers)
    ray.get([one.meet.remote(list(workers), number) for number, one in enumerate(workers)])


def cpu_seconds() -> float:
    """Seconds of CPU that this process and everything that it started have used."""
    import psutil

    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it ended in between
            continue
        total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--env-seconds", type=float, default=1.0, help="of one step")
    parser.add_argument("--reply-seconds", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2, help="rollout.num_workers")
    parser.add_argument("--repeats", type=int, default=1, help="of each row; the fastest is shown")
    options = parser.parse_args()
    import ray

    from turnwise.integrations.verl.engines import plugin as plugin  # before verl asks for it
    from turnwise.integrations.verl.faults.cluster import use_device

    ray.init("local", num_cpus=4, num_gpus=GPUS, include_dashboard=False, log_to_driver=False)
    use_device("cpu")
    with tempfile.TemporaryDirectory() as name:
        config, ids = make_config(Path(name), options)
        manager = start(config, ids, options)
        everybody = list(manager.agent_loop_workers)
        play(manager, len(everybody))  # every worker imports and opens its environments
        episodes = options.groups * options.group_size
        most = options.threads / (TURNS * options.env_seconds) if options.env_seconds else math.inf
        print(f"{episodes} episodes of {TURNS} turns; a step {options.env_seconds:g} s,", end=" ")
        print(f"a reply {options.reply_seconds:g} s; {options.threads} threads a worker")
        print("| workers | episodes/s | times one worker | at most, by the steps' sleep | cores |")
        print("|---|---|---|---|---|")
        first = None
        for number in options.workers:
            use(manager, everybody[:number])
            tries: list[tuple[float, float]] = []
            for _ in range(options.repeats):
                before = cpu_seconds()
                spent = play(manager, options.groups)
                tries.append((spent, (cpu_seconds() - before) / spent))
            seconds, cores = min(tries)
            rate = episodes / seconds
            first = first or rate / number
            print(f"| {number} | {rate:.2f} | {rate / first:.1f} |", end=" ")
            print(f"{most * number:.1f} | {cores:.1f} of {os.cpu_count()} |", flush=True)
        import transfer_queue as tq

        tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
