"""Stop conditions: stop ids and stop strings."""

from collections.abc import Sequence
from typing import Any, cast

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
)
"""Tokens by which known chat templates end a message."""


def end_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """Ids that end a reply: the tokenizer's and the model's end of sequence, and the template's end
    of turn.

    Base checkpoints name only <|endoftext|> as their end, while their template ends a message with
    another token; a model trained with that template would continue past it.

    Example:
        >>> from turnwise.testing.tiny import tiny_tokenizer
        >>> sorted(end_ids(tiny_tokenizer(), None))
        [258]
    """
    found: set[int] = set()
    named = [
        tokenizer.eos_token_id,
        None if generation_config is None else generation_config.eos_token_id,
    ]
    for value in named:
        if isinstance(value, list | tuple):
            found.update(cast(Sequence[int], value))
        elif value is not None:
            found.add(value)
    template = str(tokenizer.chat_template or "")
    vocabulary = tokenizer.get_vocab()
    found.update(
        vocabulary[token] for token in END_OF_TURN if token in template and token in vocabulary
    )
    return frozenset(found)


class StopChecker:
    """Checks after each token whether the completion ends.

    A stop string is looked for in the text of the last tokens only, as many as could hold it: a
    token has at least one byte and a character at most four, so the cost of a token does not grow
    with the completion. Where the last character of every stop string is a single byte that no
    decoder strips, only a token that has it is looked at.

    Example:
        >>> from turnwise.testing.tiny import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> stops = StopChecker(tokenizer, ids=frozenset({258}), strings=("</answer>",))
        >>> said = tokenizer.encode("<answer>up</answer>")
        >>> [n for n in range(1, len(said) + 1) if stops.reached(said[:n])]
        [19]
        >>> stops.reached([65, 258])
        True
    """

    def __init__(self, tokenizer: Any, *, ids: frozenset[int], strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._strings = tuple(strings)
        if "" in self._strings:
            raise ValueError("a stop string must not be empty; remove it from `stop`")
        self._tail = max((4 * len(string) + 8 for string in self._strings), default=0)
        ends = {string[-1] for string in self._strings}
        self._ends = ends if all(end.isascii() and not end.isspace() for end in ends) else None
        self._may_end: dict[int, bool] = {}

    def reached(self, completion: Sequence[int]) -> bool:
        """True if the completion's last token ends it."""
        last = completion[-1]
        if last in self._ids:
            return True
        if not self._strings or not self._can_end(last):
            return False
        text = self._tokenizer.decode(completion[-self._tail :], skip_special_tokens=False)
        return any(string in text for string in self._strings)

    def _can_end(self, token: int) -> bool:
        """True if this token can complete a stop string."""
        known = self._may_end.get(token)
        if known is None:
            text = (
                ""
                if self._ends is None
                else self._tokenizer.decode([token], skip_special_tokens=False)
            )
            known = self._may_end[token] = self._ends is None or any(
                end in text for end in self._ends
            )
        return known
