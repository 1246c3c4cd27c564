"""vLLM on a machine without a GPU, for test_trl_vllm.py: what is not real there is in this file.

1. `keep_plain_weights`: vLLM's CPU backend repacks the weights of its linear layers and drops the
   originals, so that none can be loaded afterwards. With this they stay as they are, and a layer is
   `F.linear`.
2. `TCPWeightTransferEngine` and `trainer_side`: TRL moves weights to a vLLM server over NCCL. Here
   they go through the TCP store of the same vLLM process group. The server's requests, and vLLM's
   loading of the weights, are its own.
3. `one_small_llm`: settings that TRL's colocate mode has no argument for, and one vLLM for several
   trainers.

vLLM calls `register` in each of its processes, by the entry point that the test writes.
"""

from typing import Any

import torch


def register() -> None:
    """The plugin's entry point; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    keep_plain_weights()
    if "tcp" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("tcp", __name__, "TCPWeightTransferEngine")


def keep_plain_weights() -> None:
    import vllm.model_executor.layers.linear  # noqa: F401
    import vllm.model_executor.layers.utils as utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def one_small_llm() -> None:
    """In float32, where vLLM would take bfloat16; not compiled; and the same one for every trainer
    of the process."""
    import functools

    import trl.generation.vllm_generation as module

    original = module.LLM

    @functools.cache
    def make(model: str) -> Any:
        return original(**{**kept[model], "dtype": "float32", "enforce_eager": True})

    kept: dict[str, dict[str, Any]] = {}

    def llm(**settings: Any) -> Any:
        kept.setdefault(settings["model"], settings)
        return make(settings["model"])

    module.LLM = llm


def __getattr__(name: str) -> Any:
    # Its base class is vLLM's, which is imported when vLLM asks for it.
    if name != "TCPWeightTransferEngine":
        raise AttributeError(name)
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class TCPWeightTransferEngine(NCCLWeightTransferEngine):
        """vLLM's engine, with its process group's TCP store in the place of NCCL."""

        def init_transfer_engine(self, init_info: Any) -> None:
            rank = init_info.rank_offset + self.parallel_config.rank
            self.model_update_group = StatelessProcessGroup.create(
                host=init_info.master_address,
                port=init_info.master_port,
                rank=rank,
                world_size=init_info.world_size,
            )

        def receive_weights(self, update_info: Any) -> None:
            for name, kind, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                weight = self.model_update_group.broadcast(
                    torch.empty(shape, dtype=getattr(torch, kind)), src=0
                )
                self.model.load_weights([(name, weight)])

    return TCPWeightTransferEngine


class _Communicator:
    """As much of vLLM's communicator as TRL's client touches."""

    def __init__(self, group: Any) -> None:
        self.group = group


def trainer_side() -> None:
    """TRL's client, with the two functions of vLLM that it sends weights with replaced, and its
    check for CUDA."""
    import trl.generation.vllm_client as module
    from vllm.distributed.utils import StatelessProcessGroup

    def open_endpoint(init_info: dict[str, Any]) -> _Communicator:
        return _Communicator(
            StatelessProcessGroup.create(
                host=init_info["master_address"],
                port=init_info["master_port"],
                rank=0,
                world_size=init_info["world_size"],
            )
        )

    def send(iterator: Any, group: _Communicator, src: int, post_iter_func: Any) -> None:
        for item in iterator:
            group.group.broadcast(post_iter_func(item).contiguous(), src=src)

    module.open_trainer_endpoint = open_endpoint
    module.packed_nccl_broadcast_producer = send
    original = module.VLLMClient.init_communicator
    # A device without an index is only compared with "cuda"; nothing is put on it.
    module.VLLMClient.init_communicator = lambda self, device=0: original(
        self, device=torch.device("cuda")
    )
