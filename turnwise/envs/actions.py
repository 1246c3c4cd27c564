"""Parses the actions in a model's reply, and writes replies. Uses plain string searches: linear
time on any input."""

from collections.abc import Sequence

from turnwise.config.schema import FormatConfig

MAX_ACTION_CHARS = 20_000
"""A longer piece is not an action."""
THOUGHTS_FORM = "inside <think></think>"
"""Names the place of thoughts, in system messages and reminders. There is nothing between the tags:
models copy what stands there."""


def split_reply(
    text: str, config: FormatConfig, legal: Sequence[str] = ()
) -> tuple[tuple[str, ...], str | None]:
    """(pieces, think): the texts between separators, legal or not; no pieces if the reply lacks the
    required format. A missing opening <think> is accepted, because some chat templates write it
    into the prompt.

    If any text is an action and a reply has only one, the text is not split: the separator may be
    part of it.

    Example:
        >>> split_reply("<think>hm</think> <answer>left || jump</answer>", FormatConfig())
        (('left', 'jump'), 'hm')
    """
    if config.style == "raw":
        return _split_body(text, config, legal), None
    start, think = 0, None
    end = text.find("</think>")
    if end >= 0:
        opening = text.find("<think>", 0, end)
        think = text[opening + len("<think>") if opening >= 0 else 0 : end]
        start = end + len("</think>")
    elif config.think:
        return (), None
    opening = text.find("<answer>", start)
    closing = text.find("</answer>", opening) if opening >= 0 else -1
    if closing < 0:
        return (), think
    return _split_body(text[opening + len("<answer>") : closing], config, legal), think


def _split_body(body: str, config: FormatConfig, legal: Sequence[str]) -> tuple[str, ...]:
    limit = config.max_actions_per_turn
    pieces = body.split(config.action_sep, limit)[:limit] if legal or limit > 1 else [body]
    return tuple(piece.strip() for piece in pieces)


def match_action(piece: str, legal: Sequence[str]) -> str | None:
    """The legal action that matches a piece of text; None if none does. Ignores case and spacing.

    Example:
        >>> match_action(" Turn  LEFT", ("turn left",))
        'turn left'
        >>> match_action("fly", ("up",)), match_action("fly", ())
        (None, 'fly')
    """
    if not piece or len(piece) > MAX_ACTION_CHARS:
        return None
    if not legal:
        return piece
    key = _key(piece)
    return next((action for action in legal if _key(action) == key), None)


def _key(text: str) -> str:
    return " ".join(text.split()).casefold()


def write_reply(actions: Sequence[str], config: FormatConfig, *, think: str = "") -> str:
    """A reply in the required format.

    Example:
        >>> write_reply(["up", "left"], FormatConfig())
        '<think></think><answer>up || left</answer>'
    """
    body = f" {config.action_sep} ".join(actions)
    if config.style == "raw":
        return body
    return (f"<think>{think}</think>" if config.think else "") + f"<answer>{body}</answer>"


def describe_format(config: FormatConfig, legal: Sequence[str] = (), *, listed: bool = True) -> str:
    """Instructions for the reply format, for the system message; `listed`: list the legal actions.

    Example:
        >>> print(describe_format(FormatConfig(max_actions_per_turn=2), ("up", "left")))
        Actions: up, left.
        Reply with your reasoning inside <think></think>, then the action inside <answer></answer>; up to 2 actions, separated by ||.
    """  # noqa: E501
    lines = [f"Actions: {', '.join(legal)}."] if legal and listed else []
    several = config.max_actions_per_turn > 1 and bool(legal)
    count = (
        f"; up to {config.max_actions_per_turn} actions, separated by {config.action_sep}"
        if several
        else ""
    )
    lines.append(f"Reply with {answer_form(config, legal)}{count}.")
    return "\n".join(lines)


def answer_form(config: FormatConfig, legal: Sequence[str] = ()) -> str:
    """The required format in a few words, for reminders.

    Example:
        >>> answer_form(FormatConfig(think=False), ("up", "left"))
        '<answer>action</answer>'
        >>> answer_form(FormatConfig())
        'your reasoning inside <think></think>, then your answer inside <answer></answer>'
        >>> answer_form(FormatConfig(style="raw"))
        'your answer alone'
        >>> answer_form(FormatConfig(think=False, spell_out=True), ("up", "left", "down"))
        '<answer>up</answer>, <answer>left</answer> or <answer>down</answer>'
    """
    thoughts = f"your reasoning {THOUGHTS_FORM}, then "
    if config.spell_out and legal:
        bare = config.model_copy(update={"think": False})
        *others, last = [write_reply([action], bare) for action in legal]
        listed = f"{', '.join(others)} or {last}" if others else last
        return thoughts + listed if config.think and config.style != "raw" else listed
    word = "action" if legal else "your answer"
    if config.style == "raw":
        return f"the {word} alone" if legal else f"{word} alone"
    if config.think:
        return f"{thoughts}{'the action' if legal else word} inside <answer></answer>"
    return f"<answer>{word}</answer>"
