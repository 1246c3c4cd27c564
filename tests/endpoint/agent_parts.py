"""Programs and a way to play them, for the tests of the endpoint."""

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.data.samples import contexts, episode_to_samples, parent_of, path_ids
from turnwise.generate.base import Generator, Sampling, Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Completion, Episode
from turnwise.user_code import name_of

Script = Callable[[Session, int], str]


class Recorder:
    """A generator that notes what every call saw and said."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._held: dict[str, tuple[int, ...]] = {}
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """(the episode, all ids that the session held, the completion)."""

    @property
    def policy_version(self) -> int:
        return self._generator.policy_version

    @property
    def max_context(self) -> int:
        return self._generator.max_context

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        held = self._held.get(session.key, ()) + tuple(new_ids)
        completion = await self._generator.generate(session, new_ids, sampling)
        self._held[session.key] = held + completion.ids
        self.calls.append((session.key.partition("#")[0], held, completion.ids))
        return completion

    async def release(self, session: Session) -> None:
        await self._generator.release(session)


def scripted(text: str | Script, **options: Any) -> Recorder:
    """Says `text`, or what the function of (session, number of the call) says."""
    tokenizer = tiny_tokenizer()
    count = iter(range(1 << 30))

    def script(session: Session, ids: tuple[int, ...], call: int) -> str:
        return text if isinstance(text, str) else text(session, next(count))

    return Recorder(
        ScriptedGenerator(script, tokenizer=tokenizer, end_id=tokenizer.eos_token_id, **options)
    )


def agent_config(program: Any, *, groups: int = 1, size: int = 1, **rollout: Any) -> Config:
    options = rollout.pop("options", {})
    name = program if isinstance(program, str) else f"agent:{name_of(program)}"
    settings = {
        "train": {"env_groups": groups, "group_size": size},
        "val": {"env_groups": groups, "group_size": size},
        "window": "full",
        "max_context": 100_000,
        "max_response_tokens": 200,
        "retries": 0,
        **rollout,
    }
    config = {
        "env": {"name": name, "options": {"workers": 0, "slots": 4, **options}},
        "rollout": settings,
        "train": {"max_turn": 12},
    }
    return load_config(config)


def play(
    program: Any, says: str | Script = "fine", *, template: str = "chatml", **settings: Any
) -> tuple[list[Episode], Recorder]:
    """The episodes of one rollout of the program, and what the generator saw. Every token is
    checked."""
    recorder = scripted(says, **settings.pop("generator", {}))
    proxy = AgentProxy(agent_config(program, **settings), recorder, tiny_tokenizer(template))
    try:
        episodes = proxy.play_all(0)
    finally:
        proxy.close()
    check_tokens(episodes, recorder)
    return episodes, recorder


def check_tokens(episodes: Sequence[Episode], recorder: Recorder) -> None:
    """Every turn holds exactly what the generator saw and said, and every sampled token is trained
    in exactly one row."""
    for episode in episodes:
        calls = [call[1:] for call in recorder.calls if call[0] == episode.id]
        seen = [
            (
                ()
                if (parent := parent_of(episode.turns, index)) is None
                else path_ids(episode.turns, parent)
            )
            + turn.prompt_ids
            for index, turn in enumerate(episode.turns)
        ]
        said = [turn.completion.ids for turn in episode.turns]
        # A call that was refused for want of a reader, or whose step failed, has no turn.
        assert [*zip(seen, said, strict=True)] == calls[: len(said)]
        if episode.turns and not episode.status.failed:
            samples = episode_to_samples(episode)
            assert len(samples) == len(contexts(episode.turns))
            trained = sum(sum(sample.response_mask) for sample in samples)
            assert trained == sum(map(len, said))
