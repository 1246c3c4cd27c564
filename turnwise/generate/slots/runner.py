"""Runs requests pass by pass over slots: the runner of the CPU engine, and of models that the block
engine does not support."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from turnwise.generate.base import GeneratorError
from turnwise.generate.requests import Request, Requests, not_finite
from turnwise.generate.scheduler import SessionState
from turnwise.generate.slots.passes import Drawn, Passes, inference


class PassRunner:
    """One forward pass at a time: a prefill if a session has unread ids, else one decode step of
    all sessions."""

    def __init__(self, model: PreTrainedModel, passes: Passes, requests: Requests) -> None:
        self._model = model
        self._passes = passes
        self._requests = requests
        self._scheduler = requests.scheduler

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    async def run(self) -> None:
        stats = self._requests.stats
        stats.evictions += self._scheduler.admit()
        batch, size = self._scheduler.next_prefill()
        start = time.perf_counter()
        if batch:
            rows = self._scheduler.prefill_rows(size)
            self._count_prefill(batch)
            self._pass(batch, lambda: self._passes.prefill(batch, size=size, num_rows=rows))
            stats.prefill_seconds += time.perf_counter() - start
        elif batch := self._scheduler.next_decode():
            stats.replayed_tokens += sum(state.at < state.num_old_spans for state in batch)
            self._pass(batch, lambda: self._passes.decode(batch))
            stats.decode_steps += 1
            stats.decode_seconds += time.perf_counter() - start
        self._requests.hand_out()
        await asyncio.sleep(0)

    def _count_prefill(self, batch: Sequence[SessionState]) -> None:
        stats = self._requests.stats
        for state in batch:
            span = state.spans[state.at]
            stats.prefilled_tokens += span.end - span.start
            if state.at < state.num_old_spans:
                stats.replayed_tokens += span.end - span.start

    def _pass(self, batch: Sequence[SessionState], call: Callable[[], Drawn]) -> None:
        try:
            with inference(self._model):
                ids, logprobs = call()
        except Exception as error:
            # An error of the model fails only the sessions of this pass.
            for state in batch:
                failure = GeneratorError(
                    f"the model failed on a pass of {len(batch)} sessions: {error!r}"
                )
                failure.__cause__ = error
                self._requests.fail(self._requests.open[state.key], failure)
            return
        for state, token, logprob in zip(batch, ids, logprobs, strict=True):
            if state.advance():
                self._accept(self._requests.open[state.key], token, logprob)

    def _accept(self, request: Request, token: int, logprob: float) -> None:
        """Appends a sampled token, and completes the request if it was the last."""
        state = request.state
        if not math.isfinite(logprob):
            if state.slot is not None:
                self._passes.clear_row(state.slot)
            self._requests.fail(request, not_finite(state))
            return
        state.append(token, logprob)
        stopped = request.stops.reached(state.ids[request.start :])
        if not stopped and len(state.logprobs) < request.limit:
            state.decode_last()
            return
        self._requests.answer(request, stopped=stopped)
