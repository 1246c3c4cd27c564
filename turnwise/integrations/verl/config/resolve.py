# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Resolves any supported form of config to verl's config and ours, with model and tokenizer on
disk."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.config.store import ConfigStore
from turnwise.envs.base import EnvFactory
from turnwise.integrations.verl.config.compose import compose
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.config.sections import (
    SECTION,
    Payload,
    read_config,
    unpack,
    write_section,
)
from turnwise.integrations.verl.config.settings import (
    check_supported,
    engine_name,
    verl_settings,
)
from turnwise.integrations.verl.config.whole import read_whole
from turnwise.integrations.verl.faults.cluster import find_placement
from turnwise.integrations.verl.trainer.records import Recorder
from turnwise.rollout.agents import Agent
from turnwise.rollout.plan import env_configs

ConfigLike = Any
# What every config of verl's own has.
_WHOLE = (
    "actor_rollout_ref",
    "data",
    "trainer",
    "transfer_queue",
)
_SEED_KEYS = ("agent", "env_template")


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where a user asks for a run to happen: nodes, GPUs per node, the address of a cluster."""

    nodes: int = 1
    gpus: int | None = None
    address: str | None = None
    device: str | None = None

    def check_device(self, device: str) -> None:
        """Raises ValueError where another device is asked for than the run's."""
        if self.device is not None and self.device != device:
            raise ValueError(
                f"device_name is {self.device!r}, but the run's device is {device!r}; remove it, "
                "or set train.device"
            )

    def check_placement(self, given: Placement) -> None:
        """Raises ValueError where a config of verl's says something else."""
        self.check_device(given.device)
        nodes = None if self.nodes == 1 else self.nodes
        pairs = (("nnodes", nodes, given.nodes), ("n_gpus_per_node", self.gpus, given.gpus))
        for name, asked, there in pairs:
            if asked is not None and asked != there:
                raise ValueError(
                    f"trainer.{name} = {there} of verl's config contradicts {asked}, which was "
                    "passed; make them equal"
                )


HERE = Where()


def to_config(config: ConfigLike) -> Config:
    """Our Config of a Config, a ConfigStore, a mapping, a file or a recipe, for the verl backend.

    Example:
        >>> to_config({"train": {"steps": 3}}).backend
        'verl'
    """
    if isinstance(config, Config):
        return config if config.backend == "verl" else config.model_copy(update={"backend": "verl"})
    if isinstance(config, ConfigStore):
        return load_config(config.tree, ["backend=verl"])
    if not isinstance(config, str | Path | Mapping):
        raise ValueError(
            "a config is a Config, a ConfigStore, settings, a file or a recipe; got "
            f"{type(config).__name__}"
        )
    return load_config(config, ["backend=verl"])


def is_verl_config(config: ConfigLike) -> bool:
    """True for a whole config of verl's, such as Hydra composes."""
    from omegaconf import DictConfig

    return isinstance(config, DictConfig) and all(key in config for key in _WHOLE)


def resolve(
    config: ConfigLike,
    *,
    tokenizer: Any = None,
    agent_cls: type[Agent] | None = None,
    factories: Mapping[str, EnvFactory],
    placement: Placement | None = None,
    where: Where = HERE,
    recorder: Recorder | None = None,
) -> tuple[Any, Config, Recorder]:
    """(verl's config, ours, the recorder). From one of our configs, verl's is made, and with it a
    run directory. Without a placement, one is found for `where`.

    Raises:
        UnsupportedError: verl cannot honour a setting.
        ValueError: the two configs contradict each other, or an environment cannot be made.
    """
    if is_verl_config(config) and not config.get(SECTION) and any(k in config for k in _SEED_KEYS):
        config, placement = read_whole(config)
        where.check_placement(placement)
    if is_verl_config(config):
        section = config.get(SECTION) or {}
        ours = read_config(config)
        check_supported(ours, engine=config.actor_rollout_ref.rollout.name)
        trainer = config.trainer
        where.check_placement(
            Placement(nodes=trainer.nnodes, gpus=trainer.n_gpus_per_node, device=trainer.device)
        )
        _check_sizes(config, ours)
        payload = Payload(factories=factories, agent_cls=agent_cls) or unpack(
            section.get("payload")
        )
        if not section.get("json"):  # otherwise a driver has already created them
            ours, payload = check_envs(ours, payload)
        if tokenizer is not None:
            _use_tokenizer(
                config, save_tokenizer(tokenizer, Path(config.trainer.default_local_dir))
            )
        write_section(config, ours, payload)
        return config, ours, recorder or _named_recorder(section.get("run_dir"), ours)
    ours = to_config(config)
    placement = placement or find_placement(
        device=ours.train.device, nodes=where.nodes, gpus=where.gpus, address=where.address
    )
    where.check_device(placement.device)
    check_supported(ours, engine=engine_name(ours, device=placement.device))
    ours, payload = check_envs(ours, Payload(factories=factories, agent_cls=agent_cls))
    if recorder is None:
        recorder = open_recorder(ours)
    assert recorder.path is not None
    verl_config = make_verl_config(
        ours, placement=placement, run_dir=recorder.path, tokenizer=tokenizer
    )
    write_section(verl_config, ours, payload)
    return verl_config, ours, recorder


def open_recorder(config: Config) -> Recorder:
    """A new run directory for this config."""
    from turnwise.log.store import RunDirectory

    run = RunDirectory.create(
        config.log,
        config,
        default_name=f"verl-{config.env.name.rpartition(':')[2]}-{config.algo.name}",
    )
    return Recorder(run, credit=config.log.credit)


def _named_recorder(run_dir: str | None, config: Config) -> Recorder:
    """Writes into the run directory that verl's config names, or nowhere."""
    if run_dir is None:
        return Recorder(None)
    from turnwise.log.store import RunDirectory

    return Recorder(RunDirectory.open(run_dir), credit=config.log.credit)


def make_verl_config(
    config: Config, *, placement: Placement, run_dir: Path, tokenizer: Any = None
) -> Any:
    """verl's config for ours, the model put where verl can load it."""
    model_path, tokenizer_path = place_model(config, run_dir, tokenizer=tokenizer)
    settings = verl_settings(
        config,
        placement=placement,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        run_dir=str(run_dir.resolve()),
    )
    return compose(settings)


def check_envs(config: Config, payload: Payload) -> tuple[Config, Payload]:
    """The effective config and payload, after creating every environment once.

    An unknown name or option is an error here, before Ray starts. Prompts from a file become an
    environment, as natively.

    Raises:
        ValueError: an environment cannot be made.
    """
    if payload.factories:
        for tag, factory in payload.factories.items():
            factory().close()
            if tag not in env_configs(config, config.rollout.train):
                raise ValueError(f"an environment was given for tag {tag!r}, which no group plays")
        return config, payload
    from turnwise.train.setup import choose_setting

    setting = choose_setting(config)
    return setting.config, Payload(factories=setting.factories, agent_cls=payload.agent_cls)


def place_model(
    config: Config,
    folder: Path,
    *,
    tokenizer: Any = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[str, str | None]:
    """(model path, tokenizer path or None) for verl, which loads both from disk in every worker.

    Without a model in the config the embedded one is built into `folder`, with the given tokenizer
    if there is one.
    """
    if config.model.path is not None and config.model.chat_template_args:
        tokenizer = _with_template_args(config, tokenizer)
    given = None if tokenizer is None else save_tokenizer(tokenizer, folder)
    if config.model.path is not None:
        return config.model.path, given or config.model.tokenizer
    from turnwise.train.networks import save_pretrained

    path = (folder / "initial").resolve()
    if path.is_dir():
        return str(path), given
    if tokenizer is None:
        from turnwise.train.warmstart import build_embedded

        model, tokenizer, _ = build_embedded(config, progress=say)
    else:
        from turnwise.models.embedded import build_model
        from turnwise.seeding import derive_seed

        seed = derive_seed(config.seed, "embedded/weights")
        model = build_model(config.model.embedded, tokenizer, seed=seed)
    save_pretrained(model, tokenizer, path)
    return str(path), given


def _with_template_args(config: Config, tokenizer: Any) -> Any:
    """The tokenizer with the template's arguments in its template, which verl's workers then
    load."""
    from turnwise.models.policy import load_tokenizer, set_template

    if tokenizer is None:
        return load_tokenizer(config.model)
    changed = deepcopy(tokenizer)
    set_template(changed, config.model)
    return changed


def save_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Where the tokenizer was saved, for every worker to load."""
    path = (folder / "tokenizer").resolve()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(path))
    return str(path)


def _use_tokenizer(config: Any, path: str) -> None:
    from omegaconf import open_dict

    with open_dict(config):
        config.actor_rollout_ref.model.tokenizer_path = path
        config.critic.model.tokenizer_path = path


def _check_sizes(config: Any, ours: Config) -> None:
    groups, rollout = ours.rollout.train, config.actor_rollout_ref.rollout
    pairs = (
        (
            "data.train_batch_size",
            config.data.train_batch_size,
            "rollout.train.env_groups",
            groups.env_groups,
        ),
        ("actor_rollout_ref.rollout.n", rollout.n, "rollout.train.group_size", groups.group_size),
    )
    for name, value, own, wanted in pairs:
        if value != wanted:
            raise ValueError(
                f"{name} = {value} contradicts {own} = {wanted} of section turnwise; make them "
                "equal"
            )
