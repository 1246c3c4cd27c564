"""Metric types with their reductions, and the metrics of a rollout. docs/metrics.md defines every
name."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.data.samples import contexts
from turnwise.types import Episode, Status


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that carries its sum and its count: a mean of means would weigh a small part like a
    large one.

    Example:
        >>> Mean(6.0, 3).merge(Mean(4.0, 1)).value
        2.5
    """

    total: float
    count: float = 1.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        values = list(values)
        return cls(math.fsum(values), len(values))

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """Example:
    >>> Sum(2.0).merge(Sum(3.0)).value
    5.0
    """

    value: float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """Example:
    >>> Max(2.0).merge(Max(3.0)).value
    3.0
    """

    value: float

    def merge(self, other: "Max") -> "Max":
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """Example:
    >>> Min(2.0).merge(Min(3.0)).value
    2.0
    """

    value: float

    def merge(self, other: "Min") -> "Min":
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Std:
    """A standard deviation over the population, from count, mean and the sum of squared distances
    (Chan et al. 1979).

    Example:
        >>> Std.of([1.0, 2.0]).merge(Std.of([3.0, 4.0])).value == Std.of([1.0, 2.0, 3.0, 4.0]).value
        True
    """

    count: float
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Std":
        values = list(values)
        mean = math.fsum(values) / len(values) if values else 0.0
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    @property
    def value(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def merge(self, other: "Std") -> "Std":
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Std(
            count, mean, self.squares + other.squares + gap**2 * self.count * other.count / count
        )


Metric = Mean | Sum | Max | Min | Std
"""Merging metrics of a kind, in any order and grouping, gives the same result."""
Metrics = Mapping[str, Metric]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """All parts as one; a metric that some parts lack is that of the others.

    Example:
        >>> merge_metrics([{"train/loss": Mean(1.0)},
        ...                {"train/loss": Mean(3.0), "train/rows": Sum(2)}])
        {'train/loss': Mean(total=4.0, count=2.0), 'train/rows': Sum(value=2)}
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = merged.get(name)
            if before is not None and type(before) is not type(metric):
                raise TypeError(
                    f"metric {name} is a {type(before).__name__} here and a "
                    f"{type(metric).__name__} there"
                )
            merged[name] = metric if before is None else before.merge(metric)  # pyright: ignore[reportArgumentType]
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """The numbers, for the run directory and the trackers."""
    return {name: float(metric.value) for name, metric in metrics.items()}


def rollout_metrics(episodes: Sequence[Episode], *, late: int | None = None) -> dict[str, float]:
    """What a rollout came to. Failed episodes are counted as such and are in nothing else. `late`:
    how many were given up because enough groups were over, where `rollout.enough_groups` is set.

    Example:
        >>> rollout_metrics([])
        {'rollout/episodes': 0.0, 'rollout/failures': 0.0, 'rollout/retries': 0.0}
    """
    played = [episode for episode in episodes if not episode.status.failed]
    metrics: dict[str, Metric] = {
        "rollout/episodes": Sum(len(played)),
        "rollout/failures": Sum(len(episodes) - len(played)),
        "rollout/retries": Sum(sum(episode.attempts - 1 for episode in episodes)),
    }
    if late is not None:
        metrics["rollout/late_episodes"] = Sum(late)
    if episodes:
        for status in Status:
            shares = [float(episode.status is status) for episode in episodes]
            metrics[f"rollout/status/{status.value}"] = Mean.of(shares)
    if played:
        metrics |= _outcomes(played) | _sizes(played) | _groups(played)
    if any(episode.turns for episode in played):
        metrics |= _replies(played) | _thoughts(played)
    return metric_values(metrics)


def rollout_timings(episodes: Sequence[Episode]) -> dict[str, float]:
    """Seconds spent in the generator and in environments, summed over concurrent episodes."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "time/generate_sum": math.fsum(turn.generate_seconds for turn in turns),
        "time/env_sum": math.fsum(turn.env_seconds for turn in turns),
        "time/generate_max": max((turn.generate_seconds for turn in turns), default=0.0),
        "time/env_max": max((turn.env_seconds for turn in turns), default=0.0),
    }


def successes(episodes: Sequence[Episode], *, speaking: Collection[str] = ()) -> list[bool | None]:
    """Success of each episode, None if its environment does not report success."""
    return judged([(episode.tag, episode.success) for episode in episodes], speaking=speaking)


def judged(
    said: Sequence[tuple[str, bool | None]], *, speaking: Collection[str] = ()
) -> list[bool | None]:
    """Whether each episode succeeded, from its tag and what its environment said of success.

    An environment speaks when it is stepped, so an episode without one legal reply heard nothing
    from it. Where others of its tag did hear, it failed: to leave it out would flatter a policy
    that cannot write a reply.

    Args:
        speaking: tags whose environments are known to report success, from other episodes.

    Example:
        >>> judged([("lake", True), ("lake", None), ("chat", None)])
        [True, False, None]
        >>> judged([("lake", None)], speaking={"lake"})
        [False]
    """
    heard = {*speaking, *(tag for tag, success in said if success is not None)}
    return [False if success is None and tag in heard else success for tag, success in said]


ONE_REPLY = 0.95
"""Share of the replies that are one text, from which on they count as all the same."""
FEWEST_TURNS = 8
"""Replies of a step below which being all the same says nothing."""


def is_collapsed(metrics: Mapping[str, float | None]) -> bool:
    """Whether in this step every reply was the same and nothing succeeded.

    Nothing succeeds where success is 0, or where no reply had an action, so that no environment
    could say anything of success. Where environments never do, nothing is known.

    Example:
        >>> is_collapsed({"rollout/success": 0.0, "rollout/top_reply": 0.98,
        ...               "rollout/turns": 4.0, "rollout/episodes": 64.0})
        True
        >>> is_collapsed({"rollout/success": 0.1, "rollout/top_reply": 1.0,
        ...               "rollout/turns": 4.0, "rollout/episodes": 64.0})
        False
    """
    success, top = metrics.get("rollout/success"), metrics.get("rollout/top_reply")
    failed = metrics.get("rollout/format_valid") == 0.0 if success is None else success == 0.0
    turns = (metrics.get("rollout/turns") or 0.0) * (metrics.get("rollout/episodes") or 0.0)
    return failed and top is not None and top >= ONE_REPLY and turns >= FEWEST_TURNS


def collapsed_steps(rows: Iterable[Mapping[str, float | None]]) -> int:
    """How many of the last steps are collapsed, in a row. Rows are in the order of steps; those
    without a rollout do not count.

    Example:
        >>> collapsed_steps([{"step": 0}, {"step": 1, "rollout/episodes": 8.0}])
        0
    """
    found = 0
    for row in rows:
        if "rollout/episodes" in row:
            found = found + 1 if is_collapsed(row) else 0
    return found


def _outcomes(played: Sequence[Episode]) -> dict[str, Metric]:
    rewards = [episode.reward for episode in played]
    metrics: dict[str, Metric] = {
        "rollout/reward": Mean.of(rewards),
        "rollout/reward_std": Std.of(rewards),
        "rollout/reward_min": Min(min(rewards)),
        "rollout/reward_max": Max(max(rewards)),
    }
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for episode in played:
        for name, value in episode.reward_parts.items():
            parts[name].append(value)
    for name, values in parts.items():  # a part that an episode lacks is 0 there
        metrics[f"rollout/reward/{name}"] = Mean(math.fsum(values), len(played))
    judged = zip(played, successes(played), strict=True)
    known = [(episode.tag, float(success)) for episode, success in judged if success is not None]
    if known:
        metrics["rollout/success"] = Mean.of(success for _, success in known)
        tags = sorted({tag for tag, _ in known})
        for tag in tags if len(tags) > 1 else ():
            metrics[f"rollout/success/{tag}"] = Mean.of(
                success for other, success in known if other == tag
            )
    return metrics


def _sizes(played: Sequence[Episode]) -> dict[str, Metric]:
    sampled = [sum(len(turn.completion.ids) for turn in episode.turns) for episode in played]
    whole = [sum(turn.num_ids for turn in episode.turns) for episode in played]
    return {
        "rollout/turns": Mean.of(len(episode.turns) for episode in played),
        "rollout/turns_max": Max(max(len(episode.turns) for episode in played)),
        "rollout/tokens": Sum(sum(sampled)),
        "rollout/prompt_tokens": Sum(sum(whole) - sum(sampled)),
        "rollout/episode_tokens": Mean.of(whole),
        "rollout/episode_tokens_max": Max(max(whole)),
        "rollout/contexts": Mean.of(len(contexts(episode.turns)) for episode in played),
        **_next_contexts(played),
    }


def _next_contexts(played: Sequence[Episode]) -> dict[str, Metric]:
    """How many turns of programs continued a conversation, branched from one, or began a new one,
    and why."""
    counts = Counter(
        str(turn.info["next_context"])
        for episode in played
        for turn in episode.turns
        if "next_context" in turn.info
    )
    return {f"rollout/next_context/{cause}": Sum(count) for cause, count in counts.items()}


def _groups(played: Sequence[Episode]) -> dict[str, Metric]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for episode in played:
        groups[episode.group_id].append(episode.reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    metrics: dict[str, Metric] = {"rollout/groups": Sum(len(groups))}
    if several:
        metrics["rollout/zero_variance_groups"] = Mean.of(
            float(min(rewards) == max(rewards)) for rewards in several
        )
        metrics["rollout/group_reward_std"] = Mean.of(Std.of(rewards).value for rewards in several)
    return metrics


def _replies(played: Sequence[Episode]) -> dict[str, Metric]:
    turns = [turn for episode in played for turn in episode.turns]
    texts = Counter(turn.text for turn in turns)
    by_state: defaultdict[str, set[str]] = defaultdict(set)
    for turn in turns:
        by_state[turn.state_key].add(turn.text)
    metrics: dict[str, Metric] = {
        "rollout/reply_tokens": Mean.of(len(turn.completion.ids) for turn in turns),
        "rollout/reply_tokens_max": Max(max(len(turn.completion.ids) for turn in turns)),
        "rollout/format_valid": Mean.of(float(turn.action is not None) for turn in turns),
        "rollout/cut_replies": Mean.of(
            float(turn.completion.finish_reason == "length") for turn in turns
        ),
        "rollout/distinct_replies": Mean(len(texts), len(turns)),
        "rollout/top_reply": Mean(texts.most_common(1)[0][1], len(turns)),
        "rollout/distinct_states": Mean(len(by_state), len(turns)),
    }
    tokens = sum(len(turn.completion.ids) for turn in turns)
    if tokens:  # a player that speaks in messages has none
        said = math.fsum(turn.completion.logprob for turn in turns)
        metrics["rollout/logprob"] = Mean(said, tokens)
        if (share := explained_share(texts, said)) is not None:
            metrics["rollout/observation_information"] = Mean(share * len(turns), len(turns))
    return metrics


def thought_of(text: str) -> str | None:
    """What a reply says before </think>, None where it has no thought.

    Example:
        >>> thought_of("<think>the goal is right</think><answer>right</answer>")
        'the goal is right'
        >>> thought_of("<answer>right</answer>") is None
        True
    """
    head, end, _ = text.partition("</think>")
    if not end:
        return None
    # A chat template may have written the opening tag into the prompt.
    return head.partition("<think>")[2] if "<think>" in head else head


def _thoughts(played: Sequence[Episode]) -> dict[str, Metric]:
    """Whether thoughts differ, say anything, and say anything of their own."""
    thoughts: list[str] = []
    copied = replies = 0
    for episode in played:
        opening = f" {_plain(' '.join(message.content for message in episode.prompt))} "
        newest = ""
        for turn in episode.turns:
            replies += 1
            found = thought_of(turn.text)
            if found is not None:
                thought = _plain(found)
                copied += bool(thought) and any(
                    f" {thought} " in read for read in (opening, newest)
                )
                thoughts.append(thought)
            newest = f" {_plain(' '.join(message.content for message in turn.messages))} "
    if not thoughts:
        return {}
    return {
        "rollout/thought_share": Mean(len(thoughts), replies),
        "rollout/thought_distinct": Mean(len(set(thoughts)), len(thoughts)),
        "rollout/thought_empty": Mean(thoughts.count(""), len(thoughts)),
        "rollout/thought_copied": Mean(copied, len(thoughts)),
    }


def _plain(text: str) -> str:
    """The words of a text, without case, spacing and punctuation, so that a copy is seen as one.

    Example:
        >>> _plain("Walk,  to G!") == _plain("walk to g")
        True
    """
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def explained_share(replies: Counter[str], logprob: float) -> float | None:
    """The mutual information of situation and reply, divided by the entropy of the reply: 0 where
    the policy replies the same way whatever it sees, 1 where what it sees decides the reply.

    The entropy of all replies together comes from their counts (with Miller and Madow's
    correction), the entropy given the situation from the log-probs that they were sampled with.

    Args:
        replies: how often each reply was given.
        logprob: the sum of the log-probs of all replies.

    Returns:
        None where replies are too different to be counted, or all the same.

    Example:
        >>> explained_share(Counter(left=500, right=500), 1000 * math.log(0.5)) < 0.01
        True
        >>> explained_share(Counter(left=500, right=500), 1000 * math.log(0.99)) > 0.98
        True
    """
    turns = replies.total()
    if turns < 64 or len(replies) * 8 > turns:
        return None
    entropy = -math.fsum(n / turns * math.log(n / turns) for n in replies.values())
    entropy += (len(replies) - 1) / (2 * turns)
    if entropy < 0.1:
        return None
    return min(max(1.0 + logprob / turns / entropy, 0.0), 1.0)
