"""Slow references: the formulas of docs/algorithms.md, token by token in plain loops, to compare
fast code with.

They read numbers one by one, so that they take nested lists as well as [B, T] tensors, and always
return lists. Values outside the mask are never read.
"""

from collections.abc import Sequence
from typing import Any, Literal

Rows = Any  # [B, T]: a tensor or a list of lists
Result = tuple[list[list[float]], list[list[float]]]  # advantages, returns


def turn_spans(mask: Sequence[Any], turn_ids: Sequence[Any] | None = None) -> list[list[int]]:
    """The positions of each turn's action tokens, for one row.

    Example:
        >>> turn_spans([0, 1, 1, 0, 1]), turn_spans([1, 1, 1], [0, 0, 1])
        ([[1, 2], [4]], [[0, 1], [2]])
    """
    spans: list[list[int]] = []
    previous = -1
    for t in range(len(mask)):
        if not mask[t]:
            continue
        same = bool(spans) and (
            previous == t - 1 if turn_ids is None else turn_ids[previous] == turn_ids[t]
        )
        if same:
            spans[-1].append(t)
        else:
            spans.append([t])
        previous = t
    return spans


def bi_level_gae(
    rewards: Rows,
    values: Rows,
    mask: Rows,
    *,
    gamma: float,
    lam: float,
    high_level_gamma: float,
    high_level_lam: float | None = None,
    turn_ids: Rows = None,
    bootstrap: Any = None,
    turn_value: Literal["last", "first"] = "last",
    last_token: Literal["replace", "add"] = "replace",
) -> Result:
    """Advantages and returns of bi-level GAE, where a row is an episode.

    Example:
        >>> bi_level_gae([[0.0, 1.0]], [[0.25, 0.5]], [[1, 1]], gamma=1.0, lam=1.0,
        ...     high_level_gamma=0.5)[0]
        [[0.75, 0.5]]
    """
    turn_lam = lam if high_level_lam is None else high_level_lam
    advantages, returns = _empty(mask), _empty(mask)
    for b in range(len(mask)):
        r, v = rewards[b], values[b]
        spans = turn_spans(mask[b], None if turn_ids is None else turn_ids[b])
        turn_advantage = 0.0
        next_anchor = next_first = 0.0 if bootstrap is None else bootstrap[b]
        for span in reversed(spans):
            first, last = span[0], span[-1]
            anchor = v[last] if turn_value == "last" else v[first]
            turn_delta = r[last] + high_level_gamma * next_anchor - anchor
            turn_advantage = turn_delta + high_level_gamma * turn_lam * turn_advantage
            advantage = turn_advantage + anchor - v[last]
            if last_token == "add":
                advantage = advantage + r[last] + gamma * next_first - v[last]
            advantages[b][last], returns[b][last] = float(advantage), float(advantage + v[last])
            for i in range(len(span) - 2, -1, -1):
                j = span[i]
                delta = r[j] + gamma * v[span[i + 1]] - v[j]
                advantage = delta + gamma * lam * advantage
                advantages[b][j], returns[b][j] = float(advantage), float(advantage + v[j])
            next_anchor, next_first = anchor, v[first]
    return advantages, returns


def token_gae(
    rewards: Rows, values: Rows, mask: Rows, *, gamma: float, lam: float, bootstrap: Any = None
) -> Result:
    """Advantages and returns of GAE over the action tokens of each row.

    Example:
        >>> token_gae([[0.0, 1.0]], [[0.25, 0.5]], [[1, 1]], gamma=1.0, lam=0.0)[0]
        [[0.25, 0.5]]
    """
    advantages, returns = _empty(mask), _empty(mask)
    for b in range(len(mask)):
        r, v, m = rewards[b], values[b], mask[b]
        following = 0.0 if bootstrap is None else bootstrap[b]
        advantage = 0.0
        for t in range(len(m) - 1, -1, -1):
            if not m[t]:
                continue
            advantage = r[t] + gamma * following - v[t] + gamma * lam * advantage
            advantages[b][t], returns[b][t] = float(advantage), float(advantage + v[t])
            following = v[t]
    return advantages, returns


def turn_gae(
    rewards: Rows,
    values: Rows,
    mask: Rows,
    *,
    gamma: float,
    lam: float,
    turn_ids: Rows = None,
    bootstrap: Any = None,
) -> Result:
    """Advantages and returns of GAE over turns, valued at their first token, spread over their
    tokens.

    Example:
        >>> turn_gae([[0.0, 1.0]], [[0.25, 0.5]], [[1, 1]], gamma=1.0, lam=1.0)[0]
        [[0.75, 0.75]]
    """
    advantages, returns = _empty(mask), _empty(mask)
    for b in range(len(mask)):
        r, v = rewards[b], values[b]
        following = 0.0 if bootstrap is None else bootstrap[b]
        advantage = 0.0
        for span in reversed(turn_spans(mask[b], None if turn_ids is None else turn_ids[b])):
            state = v[span[0]]
            advantage = (
                sum(r[t] for t in span) + gamma * following - state + gamma * lam * advantage
            )
            for t in span:
                advantages[b][t], returns[b][t] = float(advantage), float(advantage + state)
            following = state
    return advantages, returns


def _empty(mask: Rows) -> list[list[float]]:
    return [[0.0] * len(row) for row in mask]
