"""check_generator: does a generator keep the contract of `turnwise.generate.base`?"""

import math
from typing import Any

from turnwise.generate.base import Generator, Sampling, Session
from turnwise.procs.event_loop import EventLoop
from turnwise.types import Completion

MAX_TOKENS = 4


def check_generator(generator: Generator, tokenizer: Any, *, name: str = "the generator") -> None:
    """Raises ValueError for the first rule that a generator breaks, in two turns of one session:
    completions within the limit, ids of the vocabulary, one log-prob per id, a session that goes
    on, and a release that may be repeated.

    Example:
        >>> from turnwise.generate.scripted import ScriptedGenerator
        >>> from turnwise.testing.tiny import tiny_tokenizer
        >>> check_generator(ScriptedGenerator(lambda *_: [5, 6]), tiny_tokenizer())
    """
    for member in ("policy_version", "max_context", "generate", "release"):
        if not hasattr(generator, member):
            raise ValueError(f"{name} has no {member}; docs/generation.md lists what it needs")
    loop = EventLoop()
    try:
        loop.run(_two_turns(generator, tokenizer, name))
    finally:
        loop.close()


async def _two_turns(generator: Generator, tokenizer: Any, name: str) -> None:
    session = Session(key="turnwise-check", seed=0)
    ids = tokenizer.encode("a b", add_special_tokens=False) or [0]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    for turn in range(2):
        completion = await generator.generate(session, ids, sampling)
        problem = _problem(completion, len(tokenizer))
        if problem:
            raise ValueError(f"{name}, turn {turn}: {problem}")
    await generator.release(session)
    await generator.release(session)


def _problem(completion: Any, vocabulary: int) -> str | None:
    if not isinstance(completion, Completion):
        return f"generate returns a turnwise.Completion, got {type(completion).__name__}"
    if not 1 <= len(completion.ids) <= MAX_TOKENS:
        return f"max_tokens is {MAX_TOKENS}, and the completion has {len(completion.ids)} ids"
    wrong = [token for token in completion.ids if not 0 <= token < vocabulary]
    if wrong:
        return f"ids are of the vocabulary (0 to {vocabulary - 1}), got {wrong[0]}"
    if any(not math.isfinite(logprob) or logprob > 1e-4 for logprob in completion.logprobs):
        return f"log-probs are finite and at most 0, got {list(completion.logprobs)}"
    return None
