# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The networks of a run: the policy that samples and learns, its critic, and the frozen
reference."""

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from turnwise.chat.arguments import with_arguments
from turnwise.config.schema import LoraConfig, ModelConfig
from turnwise.data.batch import Batch
from turnwise.models.compiled import CompiledLayers
from turnwise.models.masters import Masters
from turnwise.models.packing import RowLayout, packed_passes
from turnwise.models.scoring import (
    TokenScores,
    chunk_elements,
    greedy_hits,
    head_of,
    hidden_states,
    token_scores,
    token_values,
    trunk_of,
)
from turnwise.models.source import ask_hub, model_source
from turnwise.procs.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The device of the networks and the precision of their parameters. Trainable parameters always
    have float32 masters.

    Example:
        >>> Precision.choose("auto", device="cpu").dtype
        torch.float32
    """

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, dtype: str, *, device: str) -> "Precision":
        """The precision for config.model.dtype and config.train.device."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"train.device is {device!r}, but this torch sees no CUDA device; use cpu or auto"
            )
        if dtype == "float16":
            raise ValueError(
                "model.dtype float16 cannot be trained: its gradients underflow without loss "
                "scaling; use bfloat16"
            )
        try:
            place = torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"train.device is auto, cpu, cuda or cuda:N, got {device!r}"
            ) from error
        chosen = {"auto": torch.bfloat16 if device.startswith("cuda") else torch.float32}.get(dtype)
        return cls(device=place, dtype=chosen or cast(torch.dtype, vars(torch)[dtype]))

    @property
    def exact(self) -> bool:
        """True where sampler and trainer compute in full precision, so that their log-probs
        agree."""
        return self.dtype == torch.float32 and self.device.type == "cpu"


class ValueHead(nn.Module):
    """A linear value head. Initialised to zero, so that an untrained critic predicts 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        # In float32 whatever the trunk ran in: a value's error goes straight into every advantage.
        return self.out(hidden.float())


class Critic(nn.Module):
    """A value head, on a trunk of its own (`trunk` set) or on the policy's (None)."""

    def __init__(self, hidden_size: int, trunk: nn.Module | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden_size)


class Policy:
    """The policy model with what belongs to it: tokenizer, critic and reference.

    Training calls `score` and `value`; both respect the batch's masks and record gradients only if
    grad mode is on. A packed `layout` is for use inside `packed()`.

    Below float32 the networks' parameters are cast in place, except the value head's, and `masters`
    keeps the float32 weights of those that learn. The generator samples with `model` itself.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        precision: Precision,
        temperature: float = 1.0,
        critic: Critic | None = None,
        reference: nn.Module | None = None,
        adapter_reference: bool = False,
        compile: bool = False,
    ) -> None:
        self.model = model.to(precision.device)
        self.tokenizer = tokenizer
        self.precision = precision
        self.temperature = temperature
        self.critic = critic.to(precision.device) if critic is not None else None
        self.reference = reference.to(precision.device) if reference is not None else None
        self.adapter_reference = adapter_reference
        self.softcap = cast(
            "float | None", vars(cast(Any, model).config).get("final_logit_softcapping")
        )
        self._refuse_foreign_heads()
        networks = (
            [self.model] if critic is None or critic.trunk is None else [self.model, critic.trunk]
        )
        self.masters = Masters(
            (p for network in networks for p in _trainable(network)), precision.dtype
        )
        for network in [*networks, *([] if self.reference is None else [self.reference])]:
            cast_parameters(network, precision.dtype)
        self.chunk_elements = chunk_elements(precision.device)
        """Logits held at once in scoring."""
        self._compiled = (
            CompiledLayers(self.model, self.critic, self.reference) if compile else None
        )

    @property
    def shares_trunk(self) -> bool:
        return self.critic is not None and self.critic.trunk is None

    @property
    def has_reference(self) -> bool:
        return self.reference is not None or self.adapter_reference

    def parameters(self) -> list[nn.Parameter]:
        """The policy's trainable parameters."""
        return _trainable(self.model)

    def critic_parameters(self) -> list[nn.Parameter]:
        """The critic's own trainable parameters (its head alone, where it shares the policy's
        trunk)."""
        return [] if self.critic is None else _trainable(self.critic)

    @contextmanager
    def packed(self) -> Generator[None]:
        """Forward and backward passes with a packed layout must run in this context."""
        compiled = nullcontext() if self._compiled is None else self._compiled.on()
        with packed_passes(self.model, self.critic, self.reference), compiled:
            yield

    def score(self, batch: Batch, layout: RowLayout | None = None) -> TokenScores:
        """The policy's log-probs and entropies."""
        return self._score(self.model, batch, layout)

    def score_and_hits(self, batch: Batch, layout: RowLayout) -> tuple[TokenScores, Tensor]:
        """Log-probs and entropies, and [R] bool: whether each response token is the policy's most
        likely one."""
        hidden = hidden_states(trunk_of(self.model), batch, layout.packed)
        hits = greedy_hits(
            head_of(self.model), hidden, batch, chunk_elements=self.chunk_elements, layout=layout
        )
        return self._token_scores(self.model, hidden, batch, layout), hits

    def score_and_value(
        self, batch: Batch, layout: RowLayout | None = None, *, detach: bool = False
    ) -> tuple[TokenScores, Tensor]:
        """Log-probs and values from one pass through a shared trunk. With `detach`, the value loss
        does not reach the trunk."""
        assert self.critic is not None
        assert self.critic.trunk is None
        packed = None if layout is None else layout.packed
        hidden = hidden_states(trunk_of(self.model), batch, packed)
        scores = self._token_scores(self.model, hidden, batch, layout)
        return scores, token_values(
            self.critic.head, hidden.detach() if detach else hidden, batch, packed
        )[0]

    def reference_logprobs(self, batch: Batch, layout: RowLayout | None = None) -> Tensor:
        """The frozen reference's log-probs: a copy of the first policy, or the policy without its
        adapters."""
        if self.adapter_reference:
            with cast(Any, self.model).disable_adapter():
                return self._score(self.model, batch, layout).logprobs
        if self.reference is None:
            raise ValueError("this run keeps no reference policy; set algo.kl_coef above 0")
        return self._score(self.reference, batch, layout).logprobs

    def value(self, batch: Batch, layout: RowLayout | None = None) -> tuple[Tensor, Tensor]:
        """(values [B, T], bootstrap [B]) of the critic."""
        if self.critic is None:
            raise ValueError("this run has no critic; its algorithm does not need one")
        packed = None if layout is None else layout.packed
        hidden = hidden_states(self.critic.trunk or trunk_of(self.model), batch, packed)
        return token_values(self.critic.head, hidden, batch, packed)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The networks that learn, by name."""
        yield "policy", self.model
        if self.critic is not None:
            yield "critic", self.critic

    def train_mode(self, on: bool) -> None:
        """Switches gradient checkpointing and LoRA dropout on for an update. Other dropout was
        removed on loading."""
        for _, module in self.modules():
            module.train(on)

    def _score(self, model: nn.Module, batch: Batch, layout: RowLayout | None) -> TokenScores:
        hidden = hidden_states(trunk_of(model), batch, None if layout is None else layout.packed)
        return self._token_scores(model, hidden, batch, layout)

    def _token_scores(
        self, model: nn.Module, hidden: Tensor, batch: Batch, layout: RowLayout | None
    ) -> TokenScores:
        return token_scores(
            head_of(model),
            hidden,
            batch,
            temperature=self.temperature,
            softcap=self.softcap,
            chunk_elements=self.chunk_elements,
            layout=layout,
        )

    @torch.no_grad()
    def _refuse_foreign_heads(self) -> None:
        """Compares trunk plus head with the model's own logits, once. Some architectures scale the
        logits in between."""
        vocabulary = int(cast(Any, head_of(self.model)).weight.shape[0])
        ids = torch.arange(2, 10, device=self.precision.device)[None] % vocabulary
        own = cast(Any, self.model)(input_ids=ids, use_cache=False).logits.float()
        ours = head_of(self.model)(
            cast(Any, trunk_of(self.model))(input_ids=ids, use_cache=False).last_hidden_state
        )
        ours = (
            ours.float()
            if self.softcap is None
            else self.softcap * torch.tanh(ours.float() / self.softcap)
        )
        if not torch.allclose(own, ours, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the output projection "
                "(largest difference "
                f"{(own - ours).abs().max().item():.3g}), which turnwise does not score; pick "
                "another architecture"
            )


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its parameters in this precision, in place. Buffers stay: rotary frequencies
    need float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer at `tokenizer` or `path`, with the configured chat template and a padding
    token."""
    from transformers import AutoTokenizer

    where = config.tokenizer or config.path
    if where is None:
        raise ValueError("model.path is None: the embedded model brings its own tokenizer")
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file and config.tokenizer is None else {}
    tokenizer = AutoTokenizer.from_pretrained(
        where, trust_remote_code=config.trust_remote_code, **gguf
    )
    set_template(tokenizer, config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def set_template(tokenizer: Any, config: ModelConfig) -> None:
    """Gives the tokenizer the configured chat template and its arguments."""
    if config.chat_template is not None:
        path = Path(config.chat_template)
        inline = "{" in config.chat_template
        tokenizer.chat_template = (
            config.chat_template if inline else path.read_text(encoding="utf-8")
        )
    if not config.chat_template_args:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError(
            "model.chat_template_args: the tokenizer has no chat template, or several; set "
            "model.chat_template to the one that gets them"
        )
    tokenizer.chat_template = with_arguments(template, config.chat_template_args)


def load_model(config: ModelConfig, *, path: str | Path | None = None) -> nn.Module:
    """The causal model at `path` (default: the config's), float32, without dropout. LoRA is added
    by `add_lora`."""
    from transformers import AutoModelForCausalLM

    where = path if path is not None else model_source(config)
    if where is None:
        raise ValueError(
            "model.path is None: build the embedded model instead (models/embedded.py)"
        )
    ask_hub(str(where))
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file and path is None else {}
    with quiet(), Progress(f"loading model {where}"):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(where), dtype=torch.float32, trust_remote_code=config.trust_remote_code, **gguf
            )
        except OSError as error:
            raise ValueError(_not_loaded(where, error)) from error
    if gguf:
        model = _dequantised(model)
    if config.adapter is not None and path is None:
        model = _with_adapter(model, Path(config.adapter).expanduser())
    return prepare(
        cast(nn.Module, model), gradient_checkpointing=config.gradient_checkpointing is True
    )


def _not_loaded(where: str | Path, error: OSError) -> str:
    first = str(error).partition("\n")[0]
    if Path(where).is_dir():
        return f"model.path: {where} cannot be loaded: {first}"
    return (
        f"model.path: {where} is no folder here, and the Hugging Face hub did not give it: {first} "
        "Download the model and give its folder, or correct OWNER/NAME"
    )


def _with_adapter(model: Any, folder: Path) -> nn.Module:
    """The model with the adapter's weights merged into its own."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(
                f"model.adapter: {folder} has no {name}; give the folder of a LoRA adapter (of a "
                "run, checkpoints/STEP/adapter)"
            )
    peft = _peft("model.adapter")
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"model.adapter: {folder} does not fit this model: {first}") from error
    return cast(nn.Module, adapted.merge_and_unload()).requires_grad_(True)


def _peft(key: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"{key} needs peft; install turnwise[lora]") from error
    return peft


def _dequantised(model: Any) -> nn.Module:
    """A plain model with a GGUF model's weights. transformers dequantises them on loading but still
    marks the model as quantised, and then refuses to save it."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return cast(nn.Module, plain)


@contextmanager
def quiet() -> Generator[None]:
    """Disables transformers' progress bars, which break the live display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def prepare(model: nn.Module, *, gradient_checkpointing: bool = False) -> nn.Module:
    """The model with dropout disabled, so that scoring matches sampling, and with gradient
    checkpointing if requested."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    if gradient_checkpointing:
        cast(Any, model).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return model.eval()


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int) -> nn.Module:
    """The model with trainable adapters on a frozen base; their first state is drawn from
    `seed`."""
    peft = _peft("model.lora")
    targets = (
        config.target_modules
        if isinstance(config.target_modules, str)
        else list(config.target_modules)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(
            cast(Any, model),
            peft.LoraConfig(
                r=config.rank,
                lora_alpha=cast(Any, config.alpha),
                lora_dropout=config.dropout,
                target_modules=targets,
                task_type="CAUSAL_LM",
            ),
        )
    return cast(nn.Module, adapted).eval()


def make_critic(model: nn.Module, *, shared: bool) -> Critic:
    """A critic for this policy: its head on the policy's trunk, or on a copy of it that learns on
    its own."""
    hidden_size = int(cast(Any, head_of(model)).weight.shape[1])
    return Critic(hidden_size, None if shared else copy.deepcopy(trunk_of(model)))


def make_reference(model: nn.Module) -> nn.Module:
    """A frozen copy of the model."""
    return copy.deepcopy(model).requires_grad_(False).eval()
