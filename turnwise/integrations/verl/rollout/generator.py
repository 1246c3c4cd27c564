"""verl's LLM servers as a Generator and as a BatchEngine: sampled ids and log-probs are passed
through unchanged."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.generate.stops import StopChecker
from turnwise.rollout.sync import BatchRequest
from turnwise.types import Completion


class ServerGenerator:
    """Generates with the servers behind one of verl's LLM clients (vllm, sglang or hf).

    verl's servers take whole contexts and cache prefixes on their own, so a session is its ids and
    a request id, which keeps its turns on the same server.
    """

    def __init__(
        self,
        client: Any,
        *,
        engine: str,
        max_context: int,
        stop_ids: frozenset[int],
        tokenizer: Any = None,
    ) -> None:
        self._client = client
        self._engine = engine
        # verl's SGLang server never fills the last position of a context
        self._max_context = max_context - 1 if engine == "sglang" else max_context
        self._stop_ids = stop_ids
        self._tokenizer = tokenizer  # needed where replies end by stop strings
        self._sessions: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        request_id, held = self._sessions.get(session.key, (uuid4().hex, ()))
        ids = (*held, *new_ids)
        completion = await self.complete(request_id, ids, sampling, seed=session.seed)
        self._sessions[session.key] = (request_id, (*ids, *completion.ids))
        return completion

    async def release(self, session: Session) -> None:
        self._sessions.pop(session.key, None)

    async def complete(
        self, request_id: str, ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """The continuation of a whole context."""
        room = self._max_context - len(ids)
        if room < 1:
            raise ContextOverflowError(
                f"a context holds {self._max_context} ids and {len(ids)} are used; raise "
                "rollout.max_context"
            )
        limit = min(sampling.max_tokens, room)
        output = await self._client.generate(
            request_id=request_id,
            prompt_ids=list(ids),
            sampling_params=self._params(request_id, sampling, limit=limit, seed=seed),
        )
        if output.stop_reason in ("abort", "aborted"):
            raise GeneratorError(f"the {self._engine} engine aborted a request; see its log")
        if not output.token_ids:
            raise GeneratorError(
                f"the {self._engine} engine returned no token for a context of {len(ids)} ids"
            )
        if output.log_probs is None or len(output.log_probs) != len(output.token_ids):
            raise GeneratorError(
                f"the {self._engine} engine must return one log-prob per token; set "
                "actor_rollout_ref.rollout.calculate_log_probs: true"
            )
        self._version = output.extra_fields.get("global_steps") or 0
        ends = StopChecker(self._tokenizer, ids=self._stop_ids, strings=sampling.stop)
        stopped = len(output.token_ids) < limit or ends.reached(output.token_ids)
        # Our own server says so exactly; a stop string may end a reply at its limit.
        if self._engine == "hf":
            stopped = output.stop_reason == "completed"
        return Completion(
            ids=tuple(output.token_ids),
            logprobs=tuple(output.log_probs),
            finish_reason="stop" if stopped else "length",
            policy_version=self._version,
        )

    def _params(
        self, request_id: str, sampling: Sampling, *, limit: int, seed: int
    ) -> dict[str, Any]:
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": limit,
        }
        if self._engine == "hf":
            params |= {
                "turnwise_session": request_id,
                "turnwise_seed": seed,
                "stop": list(sampling.stop),
            }
        else:
            params |= {
                "repetition_penalty": 1.0,
                "logprobs": True,
                "stop_token_ids": sorted(self._stop_ids),
            }
        # Stop strings cut the text, which is not used, never the ids.
        if self._engine == "vllm" and sampling.stop:
            params |= {"stop": list(sampling.stop), "skip_special_tokens": False}
        if self._engine == "sglang" and sampling.stop:
            params["stop_regex"] = [stop_pattern(string) for string in sampling.stop]
        return params


def stop_pattern(string: str) -> str:
    """A stop string as a regular expression for SGLang, which keeps the tokens of a match.

    SGLang looks for a string in as many last tokens as its tokenizer would spell it with, and
    misses one that a model spells otherwise; for an expression it reads a token per character that
    could match. A character may take as many tokens as it has bytes, hence the optional rest.

    Example:
        >>> stop_pattern("</a>"), stop_pattern("<end?>")
        ('</a>', '<end\\\\?>')
        >>> stop_pattern(chr(0x20AC)).endswith(".{0,2}")
        True
    """
    spare = len(string.encode()) - len(string)
    return re.escape(string) + (f".{{0,{spare}}}" if spare else "")


class ServerEngine:
    """The same servers for SyncMultiTurnRollout: all requests of a turn at once, on an event loop
    of its own."""

    def __init__(self, generator: ServerGenerator) -> None:
        self._generator = generator
        self._runner = asyncio.Runner()
        self._requests: dict[str, str] = {}

    @property
    def max_context(self) -> int:
        return self._generator.max_context

    def generate_sequences(self, requests: Sequence[BatchRequest]) -> Sequence[Completion]:
        async def run() -> list[Completion]:
            return await asyncio.gather(
                *(
                    self._generator.complete(
                        self._requests.setdefault(request.session.key, uuid4().hex),
                        request.ids,
                        request.sampling,
                        seed=request.session.seed,
                    )
                    for request in requests
                )
            )

        return self._runner.run(run())

    def reset(self) -> None:
        """Forgets the requests of the last rollout."""
        self._requests.clear()

    def close(self) -> None:
        self._runner.close()
