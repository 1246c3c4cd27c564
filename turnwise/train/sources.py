"""Demonstrations from where they are: played now by a player, stored in a run or a file of
episodes, or written as messages."""

import gzip
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from turnwise.config.schema import Config, EnvConfig
from turnwise.envs.base import EnvError, EnvFactory
from turnwise.envs.gate import close_quietly
from turnwise.envs.registry import make_env
from turnwise.evaluate.player_names import KINDS, load_player
from turnwise.evaluate.players import NO_TOKENS, Player, player_proxy, reply_text
from turnwise.json_lines import FileError, read_json_lines
from turnwise.log.export import conversations
from turnwise.log.metrics import successes
from turnwise.log.records import checked, obj
from turnwise.log.store import RunReader, read_episode
from turnwise.procs.threads import SideThread
from turnwise.rollout.plan import EpisodePlan, env_configs, task_of_seed, turn_limit
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.types import Episode, Json, Message, Status, Task, Turn

logger = logging.getLogger(__name__)
PER_WAVE = 256
"""Episodes that are played at once: each holds an environment."""
TASKS = 2**29
"""Tasks of demonstrations are numbered from a place below this, one after the other, so that a file
of tasks is gone through before one is played again."""
Say = Callable[[str], None]
Keep = Literal["all", "success"] | int


def collect(config: Config, *, factories: Mapping[str, EnvFactory], say: Say) -> list[Episode]:
    """The episodes of `sft.source` that `sft.keep` lets through. Those of players and of messages
    have no ids yet.

    Raises:
        ValueError: a source is unknown, unreadable or empty, or nothing is left.
    """
    refuse_unknown(config.sft.source)
    found: list[Episode] = []
    for source in config.sft.source:
        if is_player(source):
            played = _play(config, source, factories=factories)
        elif _is_run(source):
            played = _read_run(Path(source))
        else:
            played = read_file(Path(source))
        held_out = sum(episode.task.split != "train" for episode in played)
        if held_out:
            raise ValueError(
                f"{source}: {held_out} of {len(played)} episodes were played on held-out tasks, "
                "which nothing may be learned from; give episodes of training tasks"
            )
        say(f"{source}: {counted(played)}")
        found += played
    kept = keep_best(found, config.sft.keep)
    if config.sft.keep != "all":
        dropped = len(found) - len(kept)
        say(f"kept {len(kept)} episodes and dropped {dropped} (sft.keep: {config.sft.keep})")
    if config.sft.limit is not None and len(kept) > config.sft.limit:
        say(f"the first {config.sft.limit} of {len(kept)} episodes are used (sft.limit)")
        kept = kept[: config.sft.limit]
    return kept


def refuse_unknown(sources: Iterable[str]) -> None:
    """Raises ValueError for a source that is nothing to read or to play."""
    for source in sources:
        if not (is_player(source) or _is_run(source) or Path(source).is_file()):
            raise ValueError(
                f"sft.source {source!r} is neither a player ({', '.join(KINDS)}), a run directory "
                "nor a file of episodes or messages"
            )


def _is_run(source: str) -> bool:
    return (Path(source) / "config.yaml").is_file()


def is_player(source: str) -> bool:
    """Whether a word names a player.

    Example:
        >>> is_player("expert"), is_player("script:mine.py:say"), is_player("runs/expert")
        (True, True, False)
    """
    return source in ("random", "expert") or source.startswith(("script:", "openai:"))


def counted(episodes: Sequence[Episode]) -> str:
    """How many there are, and how many succeeded where that is known."""
    outcomes = Counter(episode.success for episode in episodes)
    won = "" if set(outcomes) <= {None} else f", {outcomes[True]} of them succeeded"
    return f"{len(episodes)} episodes{won}"


def keep_best(episodes: Sequence[Episode], keep: Keep) -> list[Episode]:
    """The episodes to learn from, in their order: rejection sampling by `sft.keep`. An episode that
    ended before its environment spoke of success did not succeed, if others of its tag heard of it.

    Raises:
        ValueError: none is left.
    """
    if keep == "all":
        return list(episodes)
    succeeded = successes(episodes)
    if keep == "success":
        best = [one for one, won in zip(episodes, succeeded, strict=True) if won]
        if not best and all(won is None for won in succeeded):
            raise ValueError(
                f"none of the {len(episodes)} episodes says whether it succeeded, so the best are "
                "those with the highest reward: `--best 1` keeps one of each task"
            )
    else:
        ranked: dict[str, list[int]] = {}
        for place, won in enumerate(succeeded):
            if won is not False:
                ranked.setdefault(episodes[place].task.id, []).append(place)
        chosen = {
            place
            for tried in ranked.values()
            for place in sorted(tried, key=lambda one: -episodes[one].reward)[:keep]
        }
        best = [episodes[place] for place in sorted(chosen)]
    if not best:
        raise ValueError(
            f"none of the {len(episodes)} episodes succeeded, so nothing is left to imitate; play "
            "more, take easier tasks, or learn from all of them without `--best`"
        )
    return best


def play_tasks(
    config: Config,
    player: Player,
    tag: str,
    env_config: EnvConfig,
    *,
    count: int,
    purpose: str,
    task_seed: Callable[[int], int],
    slips: float = 0.0,
    factories: Mapping[str, EnvFactory] | None = None,
) -> list[Episode]:
    """The player's episodes on training tasks of one environment, without those that failed.

    Raises:
        PlayerError: the player cannot play this environment. EnvError: the environment failed in
        every episode.
    """
    given = (factories or {}).get(tag)
    beside, stuck, limits = SideThread("turnwise-tasks"), dict[str, str](), config.rollout
    # Made where it makes tasks: what an environment opens may be bound to its thread.
    env = beside.call(given or partial(make_env, env_config), threading.TIMEOUT_MAX)
    limit = turn_limit(config, env_config, env)

    def plan(number: int) -> EpisodePlan:
        task, error = task_of_seed(
            env,
            task_seed(number),
            "train",
            tag=tag,
            thread=beside,
            limit=limits.reset_timeout,
            stuck=stuck,
        )
        return EpisodePlan(
            env_id=number,
            group_id=number,
            index=0,
            tag=tag,
            task=task,
            seed=derive_seed(config.seed, f"{purpose}/actions", number),
            noise_seed=derive_seed(config.seed, f"{purpose}/noise", number),
            episode_id=f"{purpose}-{tag}-{number}",
            max_turn=limit,
            error=error,
        )

    plans = [plan(number) for number in range(count)]
    close_quietly(env, thread=beside, limit=limits.step_timeout)
    beside.close()
    proxy = player_proxy(config, player, split="train", slips=slips, factories=factories)
    try:
        waves = [plans[start : start + PER_WAVE] for start in range(0, count, PER_WAVE)]
        episodes = [episode for wave in waves for episode in proxy.play_these(wave)]
    finally:
        proxy.close()
    played = [episode for episode in episodes if not episode.status.failed]
    if len(played) < count:
        first = next(episode for episode in episodes if episode.status.failed)
        if not played:
            kind = PlayerError if first.status is Status.GENERATOR_ERROR else EnvError
            raise kind(
                f"the {player.name} player could not play one of {count} episodes, the first: "
                f"{first.error}"
            )
        logger.warning(
            "%d of %d episodes of the %s player failed, the first: %s",
            count - len(played),
            count,
            player.name,
            first.error,
        )
    return played


def _play(config: Config, name: str, *, factories: Mapping[str, EnvFactory]) -> list[Episode]:
    player = load_player(name, config)
    table = env_configs(config, config.rollout.train)
    share = -(-config.sft.episodes // len(table))
    start = derive_seed(config.seed, "sft/task") % TASKS
    return [
        episode
        for tag, env_config in table.items()
        for episode in play_tasks(
            config,
            player,
            tag,
            env_config,
            count=share,
            purpose="sft",
            task_seed=lambda number: start + number,
            slips=config.sft.slips,
            factories=factories,
        )
    ]


def _read_run(path: Path) -> list[Episode]:
    run = RunReader(path)
    stored = [episode for step in run.steps() for episode in run.episodes(step)]
    return _usable(stored, path)


def read_file(path: Path) -> list[Episode]:
    """The episodes of a JSONL file: turnwise's own, one per line, or objects with `messages`.

    Raises:
        FileError: a line is no such object; names the line.
    """

    def read(data: Json) -> Episode | dict[str, Json]:
        row = obj(data)
        return row if "messages" in row else read_episode(row)

    found: list[Episode] = []
    for number, row in read_json_lines(path, read):
        if isinstance(row, Episode):
            found.append(row)
            continue
        try:
            found.append(from_messages(row, name=f"{path.name}:{number}"))
        except (ValueError, TypeError, LookupError) as error:
            raise FileError(f"{path}, line {number} cannot be learned from: {error}") from error
    return _usable(found, path)


def _usable(episodes: Sequence[Episode], path: Path) -> list[Episode]:
    """The episodes that can be learned from."""
    found = [episode for episode in episodes if episode.turns and not episode.status.failed]
    if not found:
        why = f"its {len(episodes)} episodes all failed" if episodes else "it is empty"
        raise ValueError(f"{path} has no episode to learn from: {why}")
    return found


def from_messages(row: Mapping[str, Json], *, name: str) -> Episode:
    """The conversation of a row as an episode. Every reply is learned, except where its `weight` is
    0. The row may have `tools`, `task`, `reward` and `success`.

    Raises:
        ValueError: the messages are no conversation.

    Example:
        >>> episode = from_messages({"messages": [{"role": "user", "content": "2 + 2?"},
        ...     {"role": "assistant", "content": "4"}]}, name="a")
        >>> episode.turns[0].text, len(episode.prompt)
        ('4', 1)
    """
    prompt: list[Message] = []
    said: list[tuple[Message, bool, list[Message]]] = []
    for number, data in enumerate(cast("list[Json]", row["messages"])):
        message = _message(obj(data), number=number)
        if message.role == "assistant":
            if not prompt or (said and not said[-1][2]):
                raise ValueError(f"message {number} is a reply, and there is nothing to reply to")
            said.append((message, data.get("weight", 1) != 0, []))
        else:
            (said[-1][2] if said else prompt).append(message)
    if not said:
        raise ValueError("no message is of the role assistant")
    reward, success = row.get("reward", 0.0), row.get("success")
    if type(reward) not in (int, float):
        raise ValueError(f"reward is a number, got {reward!r:.40}")
    last = len(said) - 1
    episode = Episode(
        id=name,
        task=Task(id=str(row.get("task", name)), seed=0),
        group_id=0,
        index=0,
        tag="messages",
        seed=0,
        noise_seed=0,
        prompt=tuple(prompt),
        tools=tuple(row.get("tools") or ()),
        turns=tuple(
            Turn(
                prompt_ids=(),
                completion=NO_TOKENS,
                text=reply_text(reply),
                restart=index == 0,
                messages=tuple(answer),
                reward=float(reward) if index == last else 0.0,
                info={"success": bool(success)} if index == last and success is not None else {},
                trained=trained,
            )
            for index, (reply, trained, answer) in enumerate(said)
        ),
        status=Status.COMPLETED,
    )
    return checked(episode)


def _message(data: Mapping[str, Any], *, number: int) -> Message:
    role, content = data.get("role"), data.get("content")
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"message {number} has the role {role!r}")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"message {number}: content is text, got {type(content).__name__}")
    return Message.from_json(data)


def write_messages(path: Path, episodes: Iterable[Episode]) -> int:
    """How many conversations were written to `path` as JSON lines, packed if its name ends in
    .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".writing_{path.name}")
    count = 0
    with (
        gzip.open(beside, "wt", encoding="utf-8")
        if path.suffix == ".gz"
        else beside.open("w", encoding="utf-8") as file
    ):
        for episode in episodes:
            for row in conversations(episode):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    beside.replace(path)
    return count
