"""Demonstrations as rows of tokens: rendered as a rollout would, held out by task, and dealt to
optimizer steps."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from turnwise.config.schema import Config
from turnwise.data.samples import contexts, episode_to_samples
from turnwise.envs.gate import clean_text
from turnwise.generate.base import ContextOverflowError
from turnwise.generate.stops import end_ids
from turnwise.log.store import read_episode, read_lines, without_seconds
from turnwise.procs.progress import Progress
from turnwise.rollout.context import ContextManager
from turnwise.rollout.outputs import LmOutput
from turnwise.seeding import derive_seed
from turnwise.types import Completion, Episode, Message, Observation, Sample, Turn

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One unbroken context of a demonstration."""

    sample: Sample
    said: tuple[int, ...]
    """The ids of its replies, as the demonstration has them."""


class DemonstrationRenderer:
    """Turns demonstrations into ids with the policy's own template, window and prefix.

    Args:
        max_context: positions of the model.
    """

    def __init__(
        self, config: Config, tokenizer: Any, generation_config: Any, *, max_context: int
    ) -> None:
        self._config = config
        self._context = ContextManager(tokenizer, config.rollout, max_context=max_context)
        self._renderer = self._context.renderer
        self._vocabulary = len(tokenizer)
        self._limit = min(max_context, config.rollout.max_context or max_context)
        end = self._renderer.turn_end()
        stops = end_ids(tokenizer, generation_config)
        self._end = end if end in stops else tokenizer.eos_token_id
        """Ends every reply: the template's own end of a turn where sampling stops there too."""

    def render(self, episodes: Sequence[Episode], *, say: Say) -> list[Episode]:
        """The episodes with their ids. Stored ids stay as they are, unless `sft.retokenize`.

        Raises:
            ValueError: stored ids are of another tokenizer, a reply does not begin with the
                configured prefix, or nothing fits into the context.
        """
        kept: list[Episode] = []
        stored, long, cut = list[Episode](), 0, 0
        with Progress("rendering demonstrations", total=len(episodes)) as progress:
            for episode in episodes:
                progress.advance()
                if not self._config.sft.retokenize and _has_ids(episode):
                    self._refuse_other_ids(episode)
                    stored.append(episode)
                    fits = all(len(one.ids) <= self._limit for one in episode_to_samples(episode))
                    found = episode if fits else replace(episode, turns=())
                else:
                    found = self._rendered(episode)
                    cut += 0 < len(found.turns) < len(episode.turns)
                long += not found.turns
                kept += [found] if found.turns else []
        if stored and (difference := self._difference(stored[0])) is not None:
            say(difference)
        limit = f"the context of {self._limit} tokens (rollout.max_context)"
        if not kept:
            raise ValueError(f"none of the {len(episodes)} demonstrations fits into {limit}")
        if long or cut:
            say(f"{long} demonstrations do not fit into {limit} and are left out, {cut} are cut")
        self._say_long_replies(kept, say)
        return kept

    def _rendered(self, episode: Episode) -> Episode:
        if any(turn.parent is not None for turn in episode.turns):
            raise ValueError(
                f"episode {episode.id}: its conversation branches, so its texts cannot be rendered "
                "again; only its stored ids can be learned"
            )
        prefix = self._context.response_prefix
        wrong = next((turn for turn in episode.turns if not turn.text.startswith(prefix)), None)
        if wrong is not None:
            raise ValueError(
                f"episode {episode.id}: a reply begins with {wrong.text[:40]!r}, and "
                f"rollout.response_prefix begins every reply with {prefix!r}; set it to the "
                "demonstrations' form, or to ''"
            )
        return tokenised(episode, self._context, end_id=self._end)

    def _refuse_other_ids(self, episode: Episode) -> None:
        """Raises where this tokenizer reads another text from the stored ids than was stored."""
        for number, turn in enumerate(episode.turns):
            ids = (*turn.prompt_ids, *turn.completion.ids)
            known = all(0 <= token < self._vocabulary for token in ids)
            read = self._renderer.decode(turn.completion.ids) if known else ""
            if not known or not turn.text.endswith(clean_text(read)):
                raise ValueError(
                    f"episode {episode.id}, turn {number}: the stored ids are of another "
                    f"tokenizer: the reply {turn.text[:40]!r} would be learned as {read[:40]!r}; "
                    "set sft.retokenize=true to learn its text in this model's tokens"
                )

    def _difference(self, episode: Episode) -> str | None:
        """A notice if this config would render a stored opening differently."""
        first = episode.turns[0]
        self._context.open(0, key=episode.id, seed=0, prompt=episode.prompt, tools=episode.tools)
        try:
            ids = self._context.next_input(0, ()).new_ids
        except ContextOverflowError:
            ids = ()
        self._context.close(0)
        if ids == first.prompt_ids:
            return None
        return (
            "stored prompts differ from what this config renders (chat template, "
            "rollout.response_prefix or rollout.window): they are learned as stored; set "
            "sft.retokenize=true to render them again"
        )

    def _say_long_replies(self, episodes: Sequence[Episode], say: Say) -> None:
        most = self._config.rollout.max_response_tokens
        lengths = [len(turn.completion.ids) for episode in episodes for turn in episode.turns]
        over = sum(length - 1 > most for length in lengths)
        if over:
            say(
                f"{over} of {len(lengths)} replies are longer than rollout.max_response_tokens="
                f"{most} (up to {max(lengths)} tokens), so the policy's will be cut; raise it"
            )


def tokenised(episode: Episode, context: ContextManager, *, end_id: int) -> Episode:
    """The episode as a rollout would tokenise it: every reply ends with `end_id`, and the episode
    ends where the context is full."""
    context.open(0, key=episode.id, seed=0, prompt=episode.prompt, tools=episode.tools)
    turns: list[Turn] = []
    answer: tuple[Message, ...] = ()
    rewritten: Observation | None = None
    for turn in episode.turns:
        own = turn.text.removeprefix(context.response_prefix)
        ids = (*context.renderer.reply_ids(own), end_id)
        try:
            asked = context.next_input(0, answer, rewritten)
        except ContextOverflowError:
            break
        completion = Completion(ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")
        context.get_env_inputs([LmOutput(env_id=0, completion=completion)])
        turns.append(
            replace(turn, prompt_ids=asked.new_ids, completion=completion, restart=asked.restart)
        )
        answer, rewritten = turn.messages, turn.rewritten
    context.close(0)
    return replace(episode, turns=tuple(turns))


def _has_ids(episode: Episode) -> bool:
    return all(turn.completion.ids for turn in episode.turns)


def hold_out(episodes: Sequence[Episode], share: float) -> tuple[list[Episode], list[Episode]]:
    """(learned, held out): the episodes of a share of the tasks are held out. Which tasks depends
    on their ids alone. One task is always learned."""
    tasks = sorted(
        {episode.task.id for episode in episodes},
        key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest(),
    )
    count = min(max(round(share * len(tasks)), 1), len(tasks) - 1) if share else 0
    apart = set(tasks[:count])
    return (
        [episode for episode in episodes if episode.task.id not in apart],
        [episode for episode in episodes if episode.task.id in apart],
    )


def rows_of(episodes: Sequence[Episode]) -> list[Row]:
    """The rows of the episodes: one per unbroken context in which something is learned."""
    rows: list[Row] = []
    for episode in episodes:
        pairs = zip(episode_to_samples(episode), contexts(episode.turns), strict=True)
        for sample, context in pairs:
            said = [token for turn in context.turns for token in episode.turns[turn].completion.ids]
            if any(sample.loss_mask):
                rows.append(Row(sample=sample, said=tuple(said)))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """The rows of one optimizer step."""

    rows: tuple[int, ...]
    epoch: int
    ends_epoch: bool


def deal(lengths: Sequence[int], *, batch_tokens: int, epochs: int, seed: int) -> list[Dealt]:
    """Every optimizer step. An epoch has each row once, in an order of its own, in steps of nearly
    equal numbers of tokens.

    Example:
        >>> steps = deal([4, 4, 4, 4], batch_tokens=8, epochs=2, seed=0)
        >>> [(step.epoch, len(step.rows), step.ends_epoch) for step in steps]
        [(0, 2, False), (0, 2, True), (1, 2, False), (1, 2, True)]
    """
    total = sum(lengths)
    count = max(round(total / batch_tokens), 1)
    steps: list[Dealt] = []
    for epoch in range(epochs):
        order = list(range(len(lengths)))
        Random(derive_seed(seed, "sft/order", epoch)).shuffle(order)
        parts: dict[int, list[int]] = {}
        before = 0
        for row in order:
            middle = 2 * before + lengths[row]
            parts.setdefault(middle * count // (2 * total), []).append(row)
            before += lengths[row]
        last = max(parts)
        steps += [
            Dealt(rows=tuple(rows), epoch=epoch, ends_epoch=place == last)
            for place, rows in parts.items()
        ]
    return steps


def digest(rows: Sequence[Row]) -> str:
    """A checksum of the rows, by which a resumed run knows its demonstrations."""
    found = hashlib.sha256()
    for row in rows:
        found.update(f"{row.sample.ids}{row.sample.loss_mask}".encode())
    return found.hexdigest()


def store(path: Path, episodes: Sequence[Episode]) -> None:
    """Keeps demonstrations with their ids in a run directory."""
    beside = path.with_name(f".writing_{path.name}")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(without_seconds(episode).to_line() + "\n" for episode in episodes)
    beside.replace(path)


def load(path: Path) -> list[Episode]:
    """The demonstrations that `store` wrote."""
    return read_lines(path, read_episode)
