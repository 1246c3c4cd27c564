"""`model.chat_template_args`: the same text as the template with these keyword arguments, in every
place that renders."""

import pytest
from chat_templates import CHATML, OPEN, THINKING
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from turnwise.chat.arguments import with_arguments
from turnwise.chat.render import Renderer
from turnwise.config import load_config
from turnwise.config.schema import ModelConfig
from turnwise.evaluate.evaluation import evaluate
from turnwise.models.policy import load_tokenizer
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.load_policy import load_policy
from turnwise.train.networks import save_pretrained
from turnwise.train.warmstart import build_embedded
from turnwise.types import Message

NO_THOUGHTS = "<think>\n\n</think>\n\n"
SWITCH = (  # as Qwen3: where thinking is off, an empty thought opens the reply
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '"
    + NO_THOUGHTS.replace("\n", "\\n")
    + "' }}{%- endif %}"
)
QWEN3 = THINKING.removesuffix("{%- endif %}") + SWITCH + "{%- endif %}"
IN_MACRO = (
    "\n  {% macro head(role) %}<|im_start|>{{ role ~ (tag or '') }}\n{% endmacro %}"
    "{% for m in messages %}{{ head(m.role) + m.content }}<|im_end|>\n{% endfor %}"
    + OPEN
    + "{{ head('assistant') }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Play."},
    {"role": "user", "content": "Where to?"},
    {"role": "assistant", "content": "<think>hm</think>\n\nup"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (QWEN3, {"enable_thinking": False}),
        (QWEN3, {"enable_thinking": True}),
        (QWEN3, {"enable_thinking": None}),
        (IN_MACRO, {"tag": "!"}),
        (IN_MACRO, {"tag": 7.5}),
    ],
)
def test_rendered_as_with_keyword_arguments(template, arguments) -> None:
    renderer = Renderer(tiny_tokenizer(with_arguments(template, arguments)))
    plain = tiny_tokenizer(template)
    for size in (1, 2, 4):
        wanted = plain.apply_chat_template(
            TALK[:size], tokenize=False, add_generation_prompt=True, **arguments
        )
        messages = [Message.from_json(message) for message in TALK[:size]]
        assert renderer.prompt(messages) == wanted
        assert renderer.prompt(messages) == wanted  # by what the first rendering taught


def test_thinking_is_off_only_where_it_is_said() -> None:
    opening = [Message(role="user", content="Where to?")]
    off = Renderer(tiny_tokenizer(with_arguments(QWEN3, {"enable_thinking": False})))
    assert off.prompt(opening).endswith("<|im_start|>assistant\n" + NO_THOUGHTS)
    assert Renderer(tiny_tokenizer(QWEN3)).prompt(opening).endswith("<|im_start|>assistant\n")


@given(st.one_of(st.text(), st.booleans(), st.none(), st.integers(-(10**9), 10**9)))
def test_any_value_arrives(value) -> None:
    template = "{{ value is none }}|{{ value }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    arguments = {"value": value}
    wanted, found = (
        tiny_tokenizer(source).apply_chat_template(TALK[:1], tokenize=False, **given)
        for source, given in ((template, arguments), (with_arguments(template, arguments), {}))
    )
    assert found == wanted


def test_a_stored_tokenizer_keeps_them_and_gets_them_once(tmp_path) -> None:
    tiny_tokenizer(QWEN3).save_pretrained(tmp_path / "a")
    config = ModelConfig(path=str(tmp_path / "a"), chat_template_args={"enable_thinking": False})
    first = load_tokenizer(config)
    first.save_pretrained(tmp_path / "b")
    second = load_tokenizer(config.model_copy(update={"path": str(tmp_path / "b")}))
    assert second.chat_template == first.chat_template != QWEN3


def test_an_evaluation_plays_with_them(tmp_path) -> None:
    save_pretrained(tiny_model(), tiny_tokenizer(QWEN3), tmp_path / "model")
    config = load_config(
        {
            "model": {"path": str(tmp_path / "model")},
            "env": {"name": "simple_game", "max_turn": 1},
            "rollout": {"max_response_tokens": 4, "isolation": "inline"},
            "train": {"device": "cpu"},
        },
        ["data.apply_chat_template_kwargs.enable_thinking=False"],
    )
    assert config.model.chat_template_args == {"enable_thinking": False}
    player = load_policy(config)
    (episode,) = evaluate(config, player, episodes=1).episodes
    read = player.tokenizer.decode(episode.turns[0].prompt_ids)
    assert read.endswith("<|im_start|>assistant\n" + NO_THOUGHTS)


def test_what_changes_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="does not read 'enable_thinking'; it reads none"):
        with_arguments(CHATML, {"enable_thinking": False})
    for name in ("messages", "enable-thinking", "loop"):
        with pytest.raises(ValidationError, match="names variables of a chat template"):
            ModelConfig(chat_template_args={name: True})
    tiny_tokenizer("none").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(ModelConfig(path=str(tmp_path), chat_template_args={"a": 1}))
    with pytest.raises(ValueError, match="the embedded model's template reads none"):
        build_embedded(load_config({"model": {"chat_template_args": {"a": 1}}}))
