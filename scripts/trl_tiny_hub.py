"""Tiny models, tokenizers and data sets under the names that TRL's tests ask the hub for.

Models are written as a hub cache, which `from_pretrained` reads offline. All have random weights
and one tokenizer of bytes in GPT-2's order, then the pieces and special tokens whose Qwen ids the
tests write out; `with_small_ids` puts ours in their place, because a vocabulary of Qwen's size
makes the tests slow. Vision models are left out.
"""

import itertools
import re
from pathlib import Path
from typing import Any

OWNER = "trl-internal-testing"
REVISION = "0" * 40
PIECES = {
    293: " b",
    314: " {",
    330: ' "',
    397: ">\n",
    411: "out",
    450: "dec",
    497: '",',
    522: "</",
    606: "name",
    788: '":',
    894: " any",
    927: "sh",
    944: "'t",
    1318: "text",
    1414: " know",
    1513: " don",
    2765: " won",
    4913: '{"',
    5212: ' {"',
    5392: " tool",
    6023: "hi",
    6659: "call",
    7692: "async",
    9520: "step",
    11248: "}}\n",
    13477: "rement",
    14172: "tool",
    16252: " increment",
    16370: "arguments",
    17453: "Done",
    22785: "_tool",
    35744: "increment",
    64648: "multiply",
    93054: "_multiply",
    95642: '"}}\n',
}
SPECIAL = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151657: "<tool_call>",
    151658: "</tool_call>",
    151665: "<tool_response>",
    151666: "</tool_response>",
    151667: "<think>",
    151668: "</think>",
}
IDS = {theirs: 256 + rank for rank, theirs in enumerate([*PIECES, *SPECIAL])}
"""Qwen's id of a piece or special token: the id that it has here."""
SIZES: dict[str, Any] = {
    "vocab_size": 256 + len(IDS),
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": IDS[151643],
    "eos_token_id": IDS[151645],
    "bos_token_id": IDS[151643],
}
EXPERTS: dict[str, Any] = {
    "head_dim": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Cohere2ForCausalLM": ("Cohere2", "CausalLM", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "CausalLM", {"head_dim": 4}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4Moe",
        "CausalLM",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "tiny-GptOssForCausalLM": ("GptOss", "CausalLM", {**EXPERTS, "num_local_experts": 4}),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "CausalLM", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "SequenceClassification", {}),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "CausalLM", {}),
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "CausalLM", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "SequenceClassification", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "CausalLM", {"head_dim": 4}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "SequenceClassification", {"head_dim": 4}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", "CausalLM", {**EXPERTS, "num_experts": 4}),
}
REMOTE = """from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "turnwise_remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""
TEMPLATES = {"Qwen2": "qwen2_5", "Llama": "llama3_2"}
"""Which of the installed TRL's chat templates a family's tokenizer has; the others have Qwen3's."""


def make_tokenizer(family: str) -> Any:
    """The tokenizer of all models, with the chat template of a family."""
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = _bytes_in_order()
    vocabulary = {symbol: rank for rank, symbol in enumerate(alphabet.values())}
    for theirs, text in PIECES.items():
        vocabulary["".join(alphabet[byte] for byte in text.encode())] = IDS[theirs]
    vocabulary |= {text: IDS[theirs] for theirs, text in SPECIAL.items()}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    for text in SPECIAL.values():
        token = AddedToken(text, normalized=False)
        core.add_special_tokens([token]) if text.startswith("<|") else core.add_tokens([token])
    folder = Path(trl.__file__).parent / "chat_templates"
    template = folder / f"{TEMPLATES.get(family, 'qwen3')}.jinja"
    if not template.is_file():
        template = folder / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template.read_text(),
    )


def with_small_ids(source: str) -> str:
    """The source of a test, with this tokenizer's ids in its lists of Qwen's."""

    def translate(found: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda n: str(IDS.get(int(n[0]), int(n[0]))), found[0])

    return re.sub(r"\[\d+(, \d+)+\]", translate, source)


def _bytes_in_order() -> dict[int, str]:
    """GPT-2's symbol of each byte, in the order of its vocabulary: printable bytes first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    fresh = itertools.count(256)
    others = {byte: chr(next(fresh)) for byte in range(256) if byte not in printable}
    return {byte: chr(byte) for byte in printable} | others


def make_model(family: str, head: str, changes: dict[str, Any]) -> Any:
    """A model with random weights, large enough for rewards to differ."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings: dict[str, Any] = {**SIZES, **changes}
    if head == "SequenceClassification":
        settings["num_labels"] = 1
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}For{head}")(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    return model.float()


def write_hub(home: Path) -> dict[str, str]:
    """Writes every model into the cache `home`; {name: why} of those that cannot be made here."""
    failed: dict[str, str] = {}
    for name, (family, head, changes) in MODELS.items():
        folder = _snapshot(home, name)
        try:
            make_model(family, head, changes).save_pretrained(folder)
            make_tokenizer(family).save_pretrained(folder)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    _write_remote(_snapshot(home, "tiny-RemoteForCausalLM"))
    return failed


def _write_remote(folder: Path) -> None:
    """A model whose code lies beside its weights."""
    import json

    make_model("Llama", "CausalLM", {}).save_pretrained(folder)
    make_tokenizer("Llama").save_pretrained(folder)
    (folder / "remote.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "turnwise_remote"
    config["architectures"] = ["RemoteForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "remote.RemoteConfig",
        "AutoModelForCausalLM": "remote.RemoteForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _snapshot(home: Path, name: str) -> Path:
    repository = home / "hub" / f"models--{OWNER}--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    folder = repository / "snapshots" / REVISION
    folder.mkdir(parents=True)
    return folder


def load_dataset(
    name: str, config: str | None = None, *, split: Any = None, streaming: bool = False
):
    """What `datasets.load_dataset` returns for the tests' own data sets, made up here."""
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    if name != f"{OWNER}/zen" or config not in (
        "standard_prompt_only",
        "conversational_prompt_only",
    ):
        raise FileNotFoundError(f"{name} ({config}) is not made here")
    texts = [f"Line {number} of a poem says that" for number in range(6)]
    prompts: list[Any] = texts
    if config == "conversational_prompt_only":
        prompts = [[{"role": "user", "content": text}] for text in texts]
    splits = {"train": prompts[:4], "test": prompts[4:]}
    made = DatasetDict({key: Dataset.from_dict({"prompt": rows}) for key, rows in splits.items()})
    if streaming:
        made = IterableDatasetDict({key: rows.to_iterable_dataset() for key, rows in made.items()})
    return made if split is None else made[split]
