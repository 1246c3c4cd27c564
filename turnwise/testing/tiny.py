# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Tokenizers and models small enough for a test, built locally: nothing is downloaded.

The tokenizer works on bytes, so that every text has ids and every id sequence has a text. The
models are real transformers models with random weights, which is all that equality and determinism
need.
"""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ModelKind = Literal["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt2"]
TemplateKind = Literal["chatml", "rewriting", "none"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Padding, start of a message, end of a message (which is the end-of-sequence token)."""

_TOOLS = "{% if tools %}<|im_start|>system\n# Tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_CALLS = (
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
)
_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML_TEMPLATE = (
    _TOOLS
    + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _GENERATION
)
"""Only ever appends: the rendering of a longer conversation starts with the rendering of a shorter
one."""

REWRITING_TEMPLATE = (
    _TOOLS
    + "{% set last = namespace(user=-1) %}"
    + "{% for message in messages %}{% if message.role == 'user' %}"
    + "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for message in messages %}"
    + "{% set content = message.content %}"
    + "{% if message.role == 'assistant' and '</think>' in content and loop.index0 < last.user %}"
    + "{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    + "{% endif %}"
    + "<|im_start|>{{ message.role }}\n{{ content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _GENERATION
)
"""Rewrites history as Qwen3's does: thinking before the last user message disappears."""


def tiny_tokenizer(chat_template: TemplateKind | str = "chatml") -> "PreTrainedTokenizerFast":
    """A fast byte-level tokenizer of 259 tokens: 256 bytes and SPECIAL_TOKENS.

    `chat_template` is "chatml" (append-only), "rewriting" (drops earlier thinking, like Qwen3),
    "none" (a base model's tokenizer without a template), or a Jinja template of one's own.

    Example:
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.decode(tokenizer.encode("up || down")), len(tokenizer)
        ('up || down', 259)
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        '<|im_start|>user\\nhi<|im_end|>\\n'
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    named = {"chatml": CHATML_TEMPLATE, "rewriting": REWRITING_TEMPLATE, "none": None}
    tokenizer.chat_template = named.get(chat_template, chat_template)
    return tokenizer


def tiny_model(
    kind: ModelKind = "llama",
    *,
    vocab_size: int = 259,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 4096,
    sliding_window: int = 16,
    seed: int = 0,
    **overrides: Any,
) -> "PreTrainedModel":
    """A causal model with seeded random weights in float32, in eval mode, on the CPU.

    The weights are wide (standard deviation 0.2), so that greedy choices and log-probs differ from
    token to token. `overrides` go into the model's config. The global generator of torch is left as
    it was.

    Example:
        >>> model = tiny_model("qwen3")
        >>> model.config.model_type, model.num_parameters() < 200_000
        ('qwen3', True)
    """
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "attn_implementation": "sdpa",
    }
    if kind in ("qwen3", "mistral", "gemma2", "gemma3"):
        settings["head_dim"] = hidden_size // num_heads
    if kind in ("mistral", "gemma2", "gemma3"):
        settings["sliding_window"] = sliding_window
    if kind in ("gemma2", "gemma3"):
        settings["query_pre_attn_scalar"] = hidden_size // num_heads
    if kind == "gpt2":
        del settings["num_key_value_heads"], settings["intermediate_size"]
    name = {"gemma3": "gemma3_text"}.get(kind, kind)
    config = transformers.AutoConfig.for_model(name, **{**settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.float().eval()
