"""Evaluation without thoughts: what a policy reaches when every reply begins after an empty one."""

from turnwise.chat.render import Renderer, Tokenizer, tools_key
from turnwise.config.schema import Config
from turnwise.rollout.plan import env_configs
from turnwise.types import Message

EMPTY_THOUGHT = "<think></think>"


def without_thought(config: Config, tokenizer: Tokenizer) -> Config:
    """The config in which every reply begins with an empty thought (`rollout.response_prefix`), so
    that the policy answers at once.

    The prefix is part of the prompt: no token of the policy is changed or left out. Where the chat
    template itself opens the thought, the prefix only closes it.

    Raises:
        ValueError: an environment asks for no thought, or replies begin with something else.
    """
    for tag, env in env_configs(config, config.rollout.val).items():
        if env.format.style != "answer" or not env.format.think:
            raise ValueError(
                f"environment {tag!r} asks for no thought, so there is none to cut: "
                f"env.format.think is {str(env.format.think).lower()} and env.format.style is "
                f"{env.format.style}"
            )
    begun = config.rollout.response_prefix
    if begun and not begun.startswith("<think>"):
        raise ValueError(
            f"replies begin with rollout.response_prefix = {begun!r}, which leaves no room for an "
            "empty thought; set it to ''"
        )
    opened = _template_opens_thought(tokenizer)
    prefix = "</think>" if opened else EMPTY_THOUGHT
    rollout = config.rollout.model_copy(update={"response_prefix": prefix})
    return config.model_copy(update={"rollout": rollout})


def _template_opens_thought(tokenizer: Tokenizer) -> bool:
    asked = [Message(role="user", content="?")]
    rendered = Renderer(tokenizer).render(asked, (), key=tools_key(()))
    return rendered.text.rstrip().endswith("<think>")
