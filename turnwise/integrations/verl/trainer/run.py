# pyright: reportUnknownMemberType=false
"""`turnwise train --backend verl`: a whole run on verl, from a config to a report."""

from pathlib import Path

from turnwise.config.schema import Config
from turnwise.integrations.verl.config.require import require_verl
from turnwise.integrations.verl.config.settings import engine_name
from turnwise.integrations.verl.faults.cluster import (
    check_engine,
    find_placement,
    ray_options,
    start_ray,
)
from turnwise.integrations.verl.trainer.records import Recorder


def train(
    config: Config,
    *,
    nodes: int = 1,
    gpus: int | None = None,
    address: str | None = None,
    resume: Path | None = None,
) -> Path:
    """Trains to the end; the run directory.

    Args:
        nodes: how many machines; more than one needs `address`.
        gpus: per node. None: all that this machine has. On the CPU (train.device: cpu): ranks.
        address: of a running Ray cluster (host:port, or "auto"). None: Ray is started here and
            stopped at the end.
        resume: a run directory of the verl backend to go on with, from verl's last checkpoint.

    Raises:
        VerlUnavailableError: verl, Ray or the engine is missing, or verl of a version that was not
            checked.
        ClusterError: the devices that were asked for are not there.
        UnsupportedError: verl cannot honour a setting.
        WorkerDiedError: a process of the run is gone.
    """
    require_verl()
    placement = find_placement(device=config.train.device, nodes=nodes, gpus=gpus, address=address)
    check_engine(engine_name(config, device=placement.device), address=address)
    recorder = _recorder(config, resume)
    started = False
    try:
        from turnwise.integrations.verl.config.resolve import resolve

        # Everything that can be wrong in a config is said before Ray starts.
        verl_config, _, recorder = resolve(
            config, factories={}, placement=placement, recorder=recorder
        )
        if resume is not None:
            verl_config.trainer.resume_mode = "auto"
        started = start_ray(placement, address=address, options=ray_options(config.verl))
        from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer

        # verl declares `on_sample_end` as abstract and does not implement it in its own trainer.
        trainer = AgentTrainer(  # pyright: ignore[reportAbstractUsage]
            verl_config, recorder=recorder
        )
        trainer.init_workers()
        trainer.fit()
        assert recorder.path is not None
        if config.log.report:
            from turnwise.inspect.report import write_report

            write_report(recorder.path)
        return recorder.path
    finally:
        if recorder is not None:
            recorder.close()
        if started:
            import ray

            ray.shutdown()


def _recorder(config: Config, resume: Path | None) -> Recorder | None:
    if resume is None:
        return None
    from turnwise.log.store import RunDirectory

    latest = resume / "checkpoints" / "latest_checkpointed_iteration.txt"
    if not latest.is_file():
        raise ValueError(
            f"{resume} holds no checkpoint of the verl backend: {latest.name} is missing; start "
            "a new run"
        )
    return Recorder(RunDirectory.open(resume), credit=config.log.credit)
