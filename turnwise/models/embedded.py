# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The model that turnwise builds when none is given: a small Llama, and a tokenizer for the words
of the environment.

Tokens are words and single symbols, so that a map is a grid of tokens and a reply is short. Bytes
are the fallback, so that every text can be encoded. Nothing is downloaded.
"""

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from turnwise.config.schema import EmbeddedConfig

MAX_CONTEXT = 2048
"""Positions of the embedded model where a run asks for no more."""
MAX_VOCABULARY = 2048
"""Bytes, words and special tokens together; rarer words are spelled."""

_PAD, _END = "<|pad|>", "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "||")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_PIECES = r" ?[A-Z]?[a-z]+| ?[^\sa-z]|\s"
"""A word, or one symbol, each with the space before it: "P _ O" is three tokens, never one that
hides a row."""


def build_tokenizer(texts: Iterable[str]) -> Any:
    """A tokenizer whose tokens are the words and symbols of these texts.

    Example:
        >>> tokenizer = build_tokenizer(["Find the goal. P _ O G", "<answer>Right</answer>"])
        >>> tokenizer.tokenize("<answer>Right</answer>")
        ['<answer>', 'Right', '</answer>']
        >>> tokenizer.decode(tokenizer.encode("unseen: \u00e9"))
        'unseen: \u00e9'
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = cast(Any, pre_tokenizers).Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    cast(Any, core).decoder = decoders.ByteLevel()
    special: list[Any] = [
        AddedToken(token, normalized=False, special=True) for token in (_PAD, _END, *_ROLES)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in _TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_PAD,
        eos_token=_END,
        extra_special_tokens=list(_ROLES),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_model(
    config: EmbeddedConfig, tokenizer: Any, *, seed: int, max_context: int = MAX_CONTEXT
) -> nn.Module:
    """A Llama with random weights drawn from `seed`, in float32. torch's global generator is left
    as it was.

    Example:
        >>> model = build_model(EmbeddedConfig(hidden_size=16), build_tokenizer(["up down"]),
        ...     seed=0)
        >>> type(model).__name__
        'LlamaForCausalLM'
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=max_context,
        # The usual 10000 is for contexts of many thousands; over a few hundred tokens most angles
        # hardly change.
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        # The usual 0.02 suits a width of thousands; at this width attention would stay almost
        # uniform for many steps.
        initializer_range=config.hidden_size**-0.5 * 0.8,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    return cast(nn.Module, model).float().eval()
