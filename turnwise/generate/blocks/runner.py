"""Runs requests in blocks on the device: the runner of the CUDA engine."""

import asyncio
import time
from collections.abc import Callable

from transformers import PreTrainedModel

from turnwise.generate.base import GeneratorError
from turnwise.generate.blocks.driver import BlockDriver, Outcome
from turnwise.generate.requests import Request, Requests, not_finite
from turnwise.generate.slots.passes import inference

ANSWERS = (4, 256)
"""Minimum and maximum number of completions returned at a time."""
ROUND_SECONDS = 0.002
"""Seconds of host work on environments and templates at a time, short enough that the device does
not wait."""
POLL_SECONDS = 0.0003
"""Seconds between two polls of a running block while the host is idle."""


class BlockRunner:
    """Blocks of steps on the device. Completions are returned continuously. The host works on their
    environments and templates between launches, in slices short enough to keep the device busy."""

    def __init__(self, model: PreTrainedModel, blocks: BlockDriver, requests: Requests) -> None:
        self._model = model
        self._blocks = blocks
        self._requests = requests
        self._scheduler = requests.scheduler
        self._together = ANSWERS[0]
        self._round = 0.0
        """Seconds spent on returning completions at a time."""
        requests.leave = blocks.leave

    @property
    def busy(self) -> bool:
        return self._scheduler.busy or bool(self._requests.answers) or self._blocks.running

    async def run(self) -> None:
        """Launches one block and reads the tokens of the previous one."""
        before = self._blocks.running
        self._on_device(self._launch)
        if before:
            while not self._blocks.ready:
                if self._requests.answers:
                    await self._hand_out()
                else:  # sleeping releases the GIL for threads that run environments
                    await asyncio.sleep(POLL_SECONDS)
            self._on_device(self._take)
        await self._hand_out()
        # A block is launched as late as possible so that late requests join it.
        while not self._blocks.ending(within=self._round):
            if self._requests.answers:
                await self._hand_out()
            elif self._scheduler.expecting and not self._blocks.all_done:
                await asyncio.sleep(POLL_SECONDS)
            else:
                break

    async def _hand_out(self) -> None:
        full = len(self._requests.answers) >= self._together
        started = time.perf_counter()
        self._requests.hand_out(self._together)
        await asyncio.sleep(0)
        self._round = time.perf_counter() - started
        if self._round > ROUND_SECONDS:
            self._together = max(ANSWERS[0], self._together // 2)
        elif full and self._round < ROUND_SECONDS / 2:
            self._together = min(ANSWERS[1], 2 * self._together)

    def _on_device(self, call: Callable[[], None]) -> None:
        try:
            with inference(self._model):
                call()
        except Exception as error:
            # After any error of the model, all running requests are invalid.
            failure = GeneratorError(f"the model failed on a block: {error!r}")
            failure.__cause__ = error
            self._blocks.reset()
            self._blocks.engine.free()
            self._requests.fail_all(failure)
            self._requests.evict_all()

    def _launch(self) -> None:
        blocks, stats = self._blocks, self._requests.stats
        stats.evictions += self._scheduler.admit()
        # A slot that ends is reused only after this block and the next.
        steps = max(1, blocks.engine.steps // 2)
        fresh = self._scheduler.take_begun()
        given = sum(len(state.ids) - state.cached for state in fresh)
        shared, decoded = blocks.shared_tokens, blocks.decode_steps
        blocks.launch([self._requests.open[state.key] for state in fresh], steps=steps)
        shared = blocks.shared_tokens - shared
        stats.shared_tokens += shared
        stats.prefilled_tokens += given - shared
        stats.decode_steps += blocks.decode_steps - decoded

    def _take(self) -> None:
        blocks, stats = self._blocks, self._requests.stats
        spent = (blocks.prefill_seconds, blocks.decode_seconds)
        outcomes = blocks.read()
        stats.prefill_seconds += blocks.prefill_seconds - spent[0]
        stats.decode_seconds += blocks.decode_seconds - spent[1]
        for outcome in outcomes:
            self._accept(self._requests.open[outcome.request.state.key], outcome)

    def _accept(self, request: Request, outcome: Outcome) -> None:
        """Adds the tokens of a block, and answers the request if they end it. What was drawn past
        the end of a completion that only the host can see (a stop string) is forgotten."""
        state = request.state
        sampling = state.sampling
        assert sampling is not None
        if outcome.broken:
            self._requests.fail(request, not_finite(state))
            return
        stopped = False
        if sampling.stop or sampling.stop_ids:
            for token, logprob in zip(outcome.ids, outcome.logprobs, strict=True):
                state.append(token, logprob)
                stopped = request.stops.reached(state.ids[request.start :])
                if stopped:
                    break
        else:  # without stop strings, only the last token can be a stop
            state.ids.extend(outcome.ids)
            state.logprobs.extend(outcome.logprobs)
            stopped = request.stops.reached(outcome.ids)
        if stopped or len(state.logprobs) >= request.limit:
            self._blocks.finish(request)
            self._requests.answer(request, stopped=stopped)
