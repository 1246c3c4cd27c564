# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The `hf` rollout engine of verl: our in-process generator behind a Ray actor, for machines
without vLLM or SGLang."""

import asyncio
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import Any, cast

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from turnwise.generate.base import Sampling, Session
from turnwise.generate.hf import HFGenerator
from turnwise.integrations.verl.engines.hf_session import server_name
from turnwise.seeding import derive_seed


class HFServer:
    """Takes ids and returns ids and log-probs, with continuous batching. Sessions are kept between
    turns.

    verl sends the whole context with every request. If it continues a session of the same sequence,
    only the new ids are prefilled; otherwise (another episode, a rewritten history) a new session
    begins.
    """

    def __init__(self, config: Any, model_config: Any) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        from transformers import AutoModelForCausalLM

        self.config = config
        model = omega_conf_to_dataclass(model_config)
        length = config.max_model_len or config.prompt_length + config.response_length
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model.local_path,
            dtype=getattr(torch, config.dtype),
            attn_implementation="sdpa",
            trust_remote_code=model.trust_remote_code,
        ).eval()
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._generator = HFGenerator(
            self._model, model.tokenizer, slots=min(config.max_num_seqs, 256), max_context=length
        )
        self._length = length
        self._held: dict[str, tuple[Session, list[int]]] = {}
        self._loaded: set[str] = set()
        self._running = 0
        self._draws = 0
        self.global_steps: int | None = None

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """The continuation of `prompt_ids`. `turnwise_session` and `turnwise_seed` among the
        sampling parameters name the sequence and key its noise; without them every request is a
        sequence of its own."""
        if image_data or video_data:
            raise ValueError(
                "the hf engine reads text only; use vllm or sglang for images and video"
            )
        params = dict(sampling_params)
        key = params.pop("turnwise_session", None)
        seed = params.pop("turnwise_seed", None)
        session, new_ids = self._continue(key, seed, list(prompt_ids))
        self._running += 1
        try:
            completion = await self._generator.generate(
                session, new_ids, self._sampling(params, len(prompt_ids))
            )
        except BaseException:
            await self._forget(key, session)
            raise
        finally:
            self._running -= 1
        if key is None:
            await self._generator.release(session)
        else:
            self._held[key] = (session, [*prompt_ids, *completion.ids])
        return TokenOutput(
            token_ids=list(completion.ids),
            log_probs=list(completion.logprobs),
            stop_reason="completed" if completion.finish_reason == "stop" else "length",
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps},
        )

    async def release(self, key: str) -> None:
        """Forgets a sequence and frees its cache."""
        held = self._held.pop(key, None)
        if held is not None:
            await self._generator.release(held[0])

    async def load_weights(
        self, wired: dict[str, Any], *, first: bool, last: bool, global_steps: int | None
    ) -> None:
        """Loads some of the actor's weights, as `to_wire` made them. The first bucket waits for
        running requests; with the last one the engine goes on with the new weights."""
        if first:
            await self.drain()
            self._loaded.clear()
        own = self._model.state_dict()
        unknown = sorted(set(wired) - set(own))
        if unknown:
            raise ValueError(
                "the actor sends weights that the hf engine's model does not have, such as "
                f"{unknown[:3]}"
            )
        for name, array in wired.items():
            own[name].copy_(from_wire(array, own[name].dtype))
        self._loaded |= set(wired)
        if last:
            await self._finish_loading(global_steps)

    async def _finish_loading(self, global_steps: int | None) -> None:
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        missing = sorted(set(dict(self._model.named_parameters())) - self._loaded - tied)
        if missing:
            raise ValueError(
                f"the actor sent no weights for {missing[:3]}: the engine would sample from old "
                "ones"
            )
        self._model.tie_weights()
        for key in list(self._held):
            await self.release(key)
        self._generator.weights_updated(global_steps or 0)
        self.global_steps = global_steps

    async def drain(self) -> None:
        """Waits until nothing is being generated."""
        while self._running:
            await asyncio.sleep(0.01)

    async def sleep(self) -> None:
        await self.drain()
        for key in list(self._held):
            await self.release(key)
        self._generator.free_cache()

    async def wake_up(self, tags: Any = None) -> None: ...
    async def clear_kv_cache(self) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def abort_all_requests(self, reject_request: bool = False) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_profile(self, **kwargs: Any) -> None: ...
    async def stop_profile(self) -> None: ...

    def _continue(
        self, key: str | None, seed: int | None, ids: list[int]
    ) -> tuple[Session, list[int]]:
        if key is None:
            self._draws += 1
            return Session(
                key=f"anonymous-{self._draws}",
                seed=derive_seed(self.config.seed, "hf", self._draws),
            ), ids
        held = self._held.get(key)
        if held is None:
            return Session(
                key=key, seed=seed if seed is not None else derive_seed(self.config.seed, key)
            ), ids
        session, known = held
        if ids[: len(known)] != known:
            raise ValueError(
                f"session {key!r} is continued with ids that are not what it holds; name a new "
                "session"
            )
        return session, ids[len(known) :]

    async def _forget(self, key: str | None, session: Session) -> None:
        if key is not None:
            self._held.pop(key, None)
        await self._generator.release(session)

    def _sampling(self, params: dict[str, Any], used: int) -> Sampling:
        limit = (
            params.get("max_tokens") or params.get("max_new_tokens") or self.config.response_length
        )
        top_k = params.get("top_k", -1)
        return Sampling(
            max_tokens=max(1, min(limit, self._length - used)),
            temperature=params.get("temperature", 1.0),
            top_k=max(top_k, 0),
            top_p=params.get("top_p", 1.0),
            stop=tuple(params.get("stop") or ()),
        )


class HFReplica(RolloutReplica):
    """One server per data-parallel rank: the engine has no tensor parallelism."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                "the hf engine runs on one device per replica, got a world size of "
                f"{self.world_size}"
            )
        # The server shares its rank's node and device, which Ray would hide from an actor that asks
        # for no GPU.
        worker: Any = self.workers[0]
        node, devices = await worker.__ray_call__.remote(lambda _: _whereabouts())
        platform = get_platform()
        environment = {name: "1" for name in platform.ray_noset_envvars()}
        if environment and devices is not None:
            environment[platform.visible_devices_envvar()] = devices
        server: Any = (
            cast(Any, ray.remote(num_cpus=0)(HFServer))
            .options(
                name=server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
                runtime_env={"env_vars": environment} if environment else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(config=self.config, model_config=self.model_config)
        )
        await server.wake_up.remote()  # the model is loaded once this answers
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"hf://{self.replica_rank}"


def _whereabouts() -> tuple[str, str | None]:
    """(node, visible devices) of the worker that this is called in."""
    name = get_platform().visible_devices_envvar()
    return ray.get_runtime_context().get_node_id(), os.environ.get(name)


class HFServerAdapter(BaseRollout):
    """Runs in the training worker and sends the actor's weights to its server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank = int(os.environ["RANK"])
        self._handle: Any = None

    async def resume(self, tags: Any) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"the hf engine takes whole tensors, got wire format {wire_format!r}")
        if self._handle is None:
            self._handle = ray.get_actor(server_name(self._rank))
        dtype = getattr(torch, self.config.dtype)
        first = True
        # Every rank must exhaust the generator: it gathers the shards of all of them.
        for bucket, last in buckets((name, to_wire(tensor, dtype)) for name, tensor in weights):
            await self._handle.load_weights.remote(
                bucket, first=first, last=last, global_steps=global_steps
            )
            first = False


BUCKET_BYTES = 2**30
"""Of weights in Ray's object store at a time."""


def to_wire(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """The tensor in the engine's type, as an array of integers: NumPy has no bfloat16. Ray copies
    an array into shared memory once, and pickles a tensor, which took 24 times as long."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # A copy in any case: the memory of a gathered tensor may be the next one's.
    copied = tensor.detach().to(dtype).to("cpu", copy=True)
    return copied.contiguous().view(integers).numpy()


def from_wire(array: Any, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():  # shared memory is read-only, and nothing writes to it
        warnings.simplefilter("ignore")
        return torch.from_numpy(array).view(dtype)


def buckets(
    named: Iterable[tuple[str, Any]], *, limit: int = BUCKET_BYTES
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Buckets of at most `limit` bytes, or one array, each with whether it is the last.

    Example:
        >>> import numpy as np
        >>> three = [(name, np.zeros(3, dtype=np.int16)) for name in "abc"]
        >>> [(list(found), last) for found, last in buckets(three, limit=13)]
        [(['a', 'b'], False), (['c'], True)]
    """
    bucket: dict[str, Any] = {}
    size = 0
    for name, array in named:
        if bucket and size + array.nbytes > limit:
            yield bucket, False
            bucket, size = {}, 0
        bucket[name] = array
        size += array.nbytes
    yield bucket, True
