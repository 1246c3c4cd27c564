"""Kills one process of a run in its second step and says how the driver took it."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from turnwise.config.schema import Config


def kill_scheduler(server: Any) -> None:
    """Kills the process in which an SGLang server computes; the server itself lives on."""
    import psutil
    import ray

    server_pid = ray.get(server.__ray_call__.remote(lambda _: os.getpid()))
    next(
        child
        for child in psutil.Process(server_pid).children()
        if child.name() == "sglang::scheduler"
    ).kill()


def run(path: str, victim: str) -> None:
    """Prints KILLED and a JSON object: the error's class and message, and seconds from the kill to
    the error."""
    from turnwise.integrations.verl.faults.cluster import find_placement, start_ray

    config = Config.model_validate(json.loads(Path(path).read_text()))
    start_ray(find_placement(device="cpu"))
    import ray

    from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer

    trainer = AgentTrainer(config)
    trainer.init_workers()
    victims = {
        "agent": lambda: trainer.agent_loop_manager.agent_loop_workers[0],
        "server": lambda: trainer.llm_server_manager.server_handles[0],
        "trainer": lambda: trainer.actor_rollout_wg.workers[0],
        "queue": lambda: ray.get_actor("TransferQueueController", namespace="transfer_queue"),
        "storage": lambda: ray.get_actor("TransferQueueStorageUnit#0"),
    }
    killed: list[float] = []

    def kill() -> None:
        while trainer.global_steps < 2:
            time.sleep(0.05)
        killed.append(time.monotonic())
        if victim == "scheduler":
            kill_scheduler(victims["server"]())
        else:
            ray.kill(victims[victim](), no_restart=True)

    threading.Thread(target=kill, daemon=True).start()
    try:
        trainer.fit()
    except Exception as error:
        report = {
            "error": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - killed[0],
        }
        print("KILLED", json.dumps(report), flush=True)
    finally:
        ray.shutdown()
