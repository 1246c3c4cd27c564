"""Arguments of a chat template, such as Qwen3's `enable_thinking`, as a part of the template.

So they hold wherever the tokenizer goes: in training, in evaluation, behind a server, in TRL and
verl, and in an exported model.
"""

import json
from collections.abc import Mapping

from jinja2 import Environment, TemplateError, meta

from turnwise.chat.template import EXTENSIONS

Argument = bool | int | float | str | None


def with_arguments(template: str, arguments: Mapping[str, Argument]) -> str:
    """The template with these variables set.

    Raises:
        ValueError: the template does not read one of them, so that it would change nothing.

    Example:
        >>> template = "{% if not enable_thinking %}no thoughts{% endif %}"
        >>> with_arguments(template, {"enable_thinking": False})
        '{%+ set enable_thinking = false +%}{% if not enable_thinking %}no thoughts{% endif %}'
        >>> with_arguments(template, {"thinking": False})
        Traceback (most recent call last):
        ValueError: model.chat_template_args: the chat template does not read 'thinking'; it reads enable_thinking
    """  # noqa: E501
    if not arguments:
        return template
    # The signs keep Jinja from trimming the template's own first line.
    head = "".join(f"{{%+ set {name} = {_literal(value)} +%}}" for name, value in arguments.items())
    if template.startswith(head):  # of a checkpoint, which was stored with it
        return template
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=list(EXTENSIONS))
    try:
        read = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        raise ValueError(f"the chat template is not a template of Jinja: {error}") from error
    for name in arguments:
        if name not in read:
            others = ", ".join(sorted(read - RESERVED)) or "none"
            raise ValueError(
                f"model.chat_template_args: the chat template does not read {name!r}; it reads "
                f"{others}"
            )
    return head + template


RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "namespace", "range", "dict"),
        *("bos_token", "eos_token"),
    }
)
"""Variables that every template gets."""


def _literal(value: Argument) -> str:
    """A constant in Jinja's syntax, whose escapes in strings are those of JSON."""
    return json.dumps(value, ensure_ascii=False) if value is not None else "none"
