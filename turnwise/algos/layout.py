# pyright: reportUnknownVariableType=false
"""The action tokens of a batch, concatenated by episode and turn. All estimators work on this
layout.

Gathering the action tokens first makes the estimators correct and fast: observation tokens, padding
and NaN in them are never read, and recurrences run over action tokens only.
"""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Positions of the N action tokens, M turns and E episodes of a [B, T] batch.

    Example: two rows with the masks [. x x . x] and [. . x . .]

        index            1 2 4 | 7      positions in the flattened [B, T]
        turn_lengths      2  1 | 1
        episode_turns      2   | 1
    """

    index: Tensor  # [N] int64: flat position of each action token, in the order of its episode
    turn_lengths: Tensor  # [M] int64: tokens per turn
    episode_lengths: Tensor  # [E] int64: tokens per episode
    episode_turns: Tensor  # [E] int64: turns per episode
    last_rows: Tensor  # [E] int64: the row that holds the episode's last action token
    shape: tuple[int, int]  # (B, T)

    @property
    def turn_ends(self) -> Tensor:  # [M] int64, into the N tokens
        return self.turn_lengths.cumsum(0) - 1

    @property
    def turn_starts(self) -> Tensor:  # [M] int64, into the N tokens
        return self.turn_lengths.cumsum(0) - self.turn_lengths

    def take(self, tensor: Tensor) -> Tensor:
        """The action tokens' entries of a [B, T] tensor, in float64: [N]."""
        return tensor.reshape(-1).index_select(0, self.index).double()

    def put(self, tokens: Tensor, like: Tensor) -> Tensor:
        """A [B, T] tensor with these [N] entries on the action tokens and 0 elsewhere, in the
        precision of `like`."""
        full = torch.zeros(
            self.shape[0] * self.shape[1], dtype=float_dtype(like), device=tokens.device
        )
        full[self.index] = tokens.to(full.dtype)
        return full.view(self.shape)

    def put_turns(self, turns: Tensor, like: Tensor) -> Tensor:
        """The same with these [M] entries on all tokens of their turns."""
        return self.put(torch.repeat_interleave(turns, self.turn_lengths), like)

    def turn_sums(self, tokens: Tensor) -> Tensor:
        """The sum over each turn's tokens: [M]."""
        turns = torch.repeat_interleave(self.turn_lengths)
        return tokens.new_zeros(self.turn_lengths.shape[0]).index_add_(0, turns, tokens)


def float_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, else float32: what an estimator returns for such an input."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def numbered(ids: Tensor) -> Tensor:
    """The ids numbered from 0 in ascending order, equal ones alike: [N]. In a [N, K] tensor each
    row is one id.

    Example:
        >>> numbered(torch.tensor([7, 3, 7]))
        tensor([1, 0, 1])
    """
    unique: Any = torch.unique  # pyright: ignore[reportUnknownMemberType]
    return unique(ids, dim=0 if ids.dim() > 1 else None, return_inverse=True)[1]


def build_layout(
    mask: Tensor, *, turn_ids: Tensor | None = None, episode_ids: Tensor | None = None
) -> Layout:
    """The layout of a [B, T] mask of action tokens.

    Without `turn_ids` the turns are the maximal runs of the mask. Without `episode_ids` a row is an
    episode; with them, an episode's turns are joined in their order, whatever row they are in.

    Raises:
        ValueError: a shape is wrong, or turn ids go down within a row.
    """
    mask = mask if mask.dtype == torch.bool else mask != 0
    rows, width = mask.shape
    device = mask.device
    if turn_ids is not None and turn_ids.shape != mask.shape:
        raise ValueError(
            f"turn_ids must have the mask's shape {tuple(mask.shape)}, got {tuple(turn_ids.shape)}"
        )
    row_ids = torch.arange(rows, device=device)
    episodes = row_ids if episode_ids is None else episode_ids
    if tuple(episodes.shape) != (rows,):
        raise ValueError(
            f"episode_ids must have one id per row ({rows}), got shape {tuple(episodes.shape)}"
        )
    order = row_ids if episode_ids is None else _row_order(mask, turn_ids, episodes)
    index = (mask if episode_ids is None else mask[order]).reshape(-1).nonzero().squeeze(-1)
    row_ends = torch.searchsorted(index, torch.arange(0, (rows + 1) * width, width, device=device))
    counts = row_ends.diff()  # action tokens per row, without reading the mask again
    if episode_ids is not None:
        index = index + torch.repeat_interleave((order - row_ids) * width, counts)
    # Rows without action tokens are left out.
    order, counts = (
        order[counts > 0],
        counts[counts > 0],
    )

    starts_row = counts.cumsum(0) - counts
    # Rows that open an episode.
    opens = torch.ones(counts.shape[0], dtype=torch.bool, device=device)
    opens[1:] = episodes[order][1:] != episodes[order][:-1]
    episode_starts = starts_row[opens]
    # Tokens that begin a turn.
    begins = torch.zeros(index.shape[0], dtype=torch.bool, device=device)
    if turn_ids is None:
        begins[1:] = index[1:] != index[:-1] + 1
        begins[starts_row] = True
    else:
        turns = turn_ids.reshape(-1).index_select(0, index)
        falls = turns[1:] < turns[:-1]
        falls[episode_starts[1:] - 1] = False
        if falls.any():
            index, turns = _interleaved(index, turns, episodes, width)
        begins[1:] = turns[1:] != turns[:-1]
    begins[episode_starts] = True
    turn_starts = begins.nonzero().squeeze(-1)
    episode_ends = torch.cat([episode_starts[1:], episode_starts.new_tensor([index.shape[0]])])
    first_turns = torch.searchsorted(turn_starts, episode_starts)
    return Layout(
        index=index,
        turn_lengths=_lengths(turn_starts, index.shape[0]),
        episode_lengths=_lengths(episode_starts, index.shape[0]),
        episode_turns=_lengths(first_turns, turn_starts.shape[0]),
        last_rows=index[episode_ends[: episode_starts.shape[0]] - 1] // max(width, 1),
        shape=(rows, width),
    )


def discounted_suffix_sums(x: Tensor, *, lengths: Tensor, decay: float) -> Tensor:
    """y with y_j = x_j + decay * y_{j+1} inside each segment: [N]. Segments lie end to end; nothing
    crosses them.

    The segments become the rows of a matrix, cut into chunks of about sqrt(L) where the longest has
    L entries: the recurrence runs inside all chunks at once, then over the chunks' heads, then the
    heads are added back. That is 2 sqrt(L) vector operations instead of L, with no matrix product
    that a GPU could round to TF32.

    Example:
        >>> discounted_suffix_sums(torch.tensor([1.0, 2.0, 4.0]), lengths=torch.tensor([2, 1]),
        ...     decay=0.5)
        tensor([2., 2., 4.])
    """
    if x.shape[0] == 0:
        return x.clone()
    segments = lengths.shape[0]
    longest = int(lengths.max())
    size = max(1, round(sqrt(longest)))
    chunks = ceil(longest / size)
    width = chunks * size
    starts = lengths.cumsum(0) - lengths
    rows = torch.arange(segments, device=x.device)
    place = torch.repeat_interleave(rows * width - starts, lengths)
    place += torch.arange(x.shape[0], device=x.device)  # row * width + rank in the segment
    packed = x.new_zeros(segments * width)
    packed[place] = x
    grid = packed.view(segments, chunks, size)
    for i in range(size - 2, -1, -1):
        grid[:, :, i].add_(grid[:, :, i + 1], alpha=decay)
    for chunk in range(chunks - 2, -1, -1):
        grid[:, chunk, 0].add_(grid[:, chunk + 1, 0], alpha=decay**size)
    if chunks > 1 and size > 1:
        powers = torch.tensor(
            [decay ** (size - i) for i in range(1, size)], dtype=x.dtype, device=x.device
        )
        grid[:, :-1, 1:].addcmul_(grid[:, 1:, :1], powers)
    return packed.index_select(0, place)


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates over segments that lie end to end: [N].

    d_j = r_j + gamma * v_{j+1} - v_j and A_j = d_j + gamma * lam * A_{j+1}; the value after a
    segment's end is its entry of `last_values`, or 0.
    """
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following[lengths.cumsum(0) - 1] = (
        values.new_zeros(()) if last_values is None else last_values.to(values.dtype)
    )
    deltas = rewards - values + gamma * following
    return discounted_suffix_sums(deltas, lengths=lengths, decay=gamma * lam)


def _row_order(mask: Tensor, turn_ids: Tensor | None, episodes: Tensor) -> Tensor:
    """Rows sorted by episode, an episode's rows by their first turn."""
    if turn_ids is None:
        return torch.argsort(episodes, stable=True)
    first = torch.where(mask, turn_ids, torch.iinfo(turn_ids.dtype).max).min(-1).values
    by_turn = torch.argsort(first, stable=True)
    return by_turn[torch.argsort(episodes[by_turn], stable=True)]


def _interleaved(
    index: Tensor, turns: Tensor, episodes: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """(positions, turns) of the action tokens in the order of their turns, where the rows of an
    episode take turns: a program may go back and forth between several conversations.

    Raises:
        ValueError: turn ids go down within a row.
    """
    rows = index // width
    falls = (turns[1:] < turns[:-1]) & (rows[1:] == rows[:-1])
    if falls.any():
        at = divmod(int(index[1:][falls][0]), width)
        raise ValueError(
            f"turn_ids must never go down within a row; they do at (row, position) {at}"
        )
    by_turn = torch.argsort(turns, stable=True)
    order = by_turn[torch.argsort(episodes[rows][by_turn], stable=True)]
    return index[order], turns[order]


def _lengths(starts: Tensor, total: int) -> Tensor:
    return torch.diff(starts, append=starts.new_tensor([total]))
