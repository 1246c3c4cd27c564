"""The interface between a rollout and a generator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.types import Completion


class GeneratorError(RuntimeError):
    """The generator could not answer. The episode ends as `generator_error`."""


class ContextOverflowError(GeneratorError):
    """The prompt alone does not fit into the context. The episode ends as `truncated_length`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one completion is drawn.

    Example:
        >>> Sampling(max_tokens=64, temperature=0.0).greedy
        True
    """

    max_tokens: int
    """Maximum number of tokens, the stop token included."""
    temperature: float = 1.0
    """0.0 is greedy. The returned log-probs are those of the distribution at this temperature."""
    top_k: int = 0
    """0: off. Changes the sampled distribution, so training refuses it."""
    top_p: float = 1.0
    """1.0: off. Changes the sampled distribution, so training refuses it."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens that completed the string are kept."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a completion (kept), besides the generator's own end-of-turn ids."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One growing context. Its tokens are drawn from noise keyed by (seed, position), so they do
    not depend on other sessions.

    Example:
        >>> Session(key="step3/g1/m0#0", seed=9).key
        'step3/g1/m0#0'
    """

    key: str
    """Unique among the open sessions."""
    seed: int


class Generator(Protocol):
    """Samples tokens for many sessions at once, each keeping its KV cache between turns."""

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights in use."""
        ...

    @property
    def max_context(self) -> int:
        """Maximum number of ids of one session, prompt and completions together."""
        ...

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        """The continuation of everything that the session holds plus `new_ids`.

        The session then holds the completion too (its last token included), so the next call passes
        only what is new. The first call opens the session.

        Raises:
            ContextOverflowError: fewer than one token of room is left after `new_ids`.
        """
        ...

    async def release(self, session: Session) -> None:
        """Removes the session and frees its cache. Does nothing for an unknown session."""
        ...
