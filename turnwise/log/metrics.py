"""The metrics of a rollout. docs/metrics.md defines every name."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from turnwise.data.samples import contexts
from turnwise.types import Episode, Status


def rollout_metrics(
    episodes: Sequence[Episode], *, late: int | None = None, speaking: Collection[str] = ()
) -> dict[str, float]:
    """The metrics of a rollout. Failed episodes are only counted.

    Args:
        late: episodes that were given up because enough groups were over, where
            `rollout.enough_groups` is set.
        speaking: tags whose environments are known to report success.

    Example:
        >>> rollout_metrics([])
        {'rollout/episodes': 0.0, 'rollout/failures': 0.0, 'rollout/retries': 0.0}
    """
    played = [episode for episode in episodes if not episode.status.failed]
    metrics: dict[str, float] = {
        "rollout/episodes": len(played),
        "rollout/failures": len(episodes) - len(played),
        "rollout/retries": sum(episode.attempts - 1 for episode in episodes),
    }
    if late is not None:
        metrics["rollout/late_episodes"] = late
    if episodes:
        for status in Status:
            shares = [float(episode.status is status) for episode in episodes]
            metrics[f"rollout/status/{status.value}"] = _mean(shares)
    if played:
        metrics |= _outcomes(played, speaking) | _sizes(played) | _groups(played)
    if any(episode.turns for episode in played):
        metrics |= _replies(played) | _thoughts(played)
    return {name: float(value) for name, value in metrics.items()}


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

    Success is reported by `step`, so an episode without a legal reply has no report. If other
    episodes of its tag have one, it counts as failed: leaving it out would flatter a policy that
    cannot write a reply.

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


def _mean(values: Iterable[float]) -> float:
    """The mean of at least one value.

    Example:
        >>> _mean([1.0, 2.0, 6.0])
        3.0
    """
    values = list(values)
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """The standard deviation over the population of at least one value.

    Example:
        >>> _std([1.0, 1.0, 4.0, 4.0])
        1.5
    """
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _outcomes(played: Sequence[Episode], speaking: Collection[str]) -> dict[str, float]:
    rewards = [episode.reward for episode in played]
    metrics: dict[str, float] = {
        "rollout/reward": _mean(rewards),
        "rollout/reward_std": _std(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
    }
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for episode in played:
        for name, value in episode.reward_parts.items():
            parts[name].append(value)
    for name, values in parts.items():  # a part that an episode lacks is 0 there
        metrics[f"rollout/reward/{name}"] = math.fsum(values) / len(played)
    judged = zip(played, successes(played, speaking=speaking), strict=True)
    known = [(episode.tag, float(success)) for episode, success in judged if success is not None]
    if known:
        metrics["rollout/success"] = _mean(success for _, success in known)
        tags = sorted({tag for tag, _ in known})
        for tag in tags if len(tags) > 1 else ():
            metrics[f"rollout/success/{tag}"] = _mean(
                success for other, success in known if other == tag
            )
    return metrics


def _sizes(played: Sequence[Episode]) -> dict[str, float]:
    sampled = [sum(len(turn.completion.ids) for turn in episode.turns) for episode in played]
    whole = [sum(turn.num_ids for turn in episode.turns) for episode in played]
    return {
        "rollout/turns": _mean(len(episode.turns) for episode in played),
        "rollout/turns_max": max(len(episode.turns) for episode in played),
        "rollout/tokens": sum(sampled),
        "rollout/prompt_tokens": sum(whole) - sum(sampled),
        "rollout/episode_tokens": _mean(whole),
        "rollout/episode_tokens_max": max(whole),
        "rollout/contexts": _mean(len(contexts(episode.turns)) for episode in played),
        **{f"rollout/context/{cause}": n for cause, n in context_causes(played).items()},
    }


def context_causes(episodes: Iterable[Episode]) -> dict[str, int]:
    """How many turns of programs continued a conversation, branched from one, or began a new one,
    and why."""
    causes = (str(turn.info.get("context_cause", "")) for one in episodes for turn in one.turns)
    return dict(Counter(filter(None, causes)))


def _groups(played: Sequence[Episode]) -> dict[str, float]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for episode in played:
        groups[episode.group_id].append(episode.reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    metrics: dict[str, float] = {"rollout/groups": len(groups)}
    if several:
        metrics["rollout/zero_variance_groups"] = _mean(
            float(min(rewards) == max(rewards)) for rewards in several
        )
        metrics["rollout/group_reward_std"] = _mean(_std(rewards) for rewards in several)
    return metrics


def _replies(played: Sequence[Episode]) -> dict[str, float]:
    turns = [turn for episode in played for turn in episode.turns]
    texts = Counter(turn.text for turn in turns)
    by_state: defaultdict[str, set[str]] = defaultdict(set)
    for turn in turns:
        by_state[turn.state_key].add(turn.text)
    by_speaker: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for episode in played:
        for turn in episode.turns:
            by_speaker[episode.tag, turn.role][turn.text] += 1
    top = sum(said.most_common(1)[0][1] for said in by_speaker.values())
    metrics: dict[str, float] = {
        "rollout/reply_tokens": _mean(len(turn.completion.ids) for turn in turns),
        "rollout/reply_tokens_max": max(len(turn.completion.ids) for turn in turns),
        "rollout/format_valid": _mean(float(turn.action is not None) for turn in turns),
        "rollout/cut_replies": _mean(
            float(turn.completion.finish_reason == "length") for turn in turns
        ),
        "rollout/distinct_replies": len(texts) / len(turns),
        "rollout/top_reply": top / len(turns),
        "rollout/distinct_states": len(by_state) / len(turns),
    }
    tokens = sum(len(turn.completion.ids) for turn in turns)
    if tokens:  # a player that speaks in messages has none
        said = math.fsum(turn.completion.logprob for turn in turns)
        metrics["rollout/logprob"] = said / tokens
        if (share := explained_share(texts, said)) is not None:
            # A mean over the replies: `share` alone can differ from it in the last bit.
            metrics["rollout/observation_information"] = share * len(turns) / len(turns)
    return metrics


def thought_of(text: str) -> str | None:
    """The text of a reply before </think>, None where it has no thought.

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


def _thoughts(played: Sequence[Episode]) -> dict[str, float]:
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
        "rollout/thought_share": len(thoughts) / replies,
        "rollout/thought_distinct": len(set(thoughts)) / len(thoughts),
        "rollout/thought_empty": thoughts.count("") / len(thoughts),
        "rollout/thought_copied": copied / len(thoughts),
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
