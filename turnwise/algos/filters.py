"""Group filters: select the groups to train on by the spread of their rewards."""

import math

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.groups import score_groups
from turnwise.data.batch import Batch


def filter_groups(batch: Batch, algorithm: Algorithm) -> tuple[Tensor, dict[str, float]]:
    """The indices of the rows to keep (ascending, maybe none), and what was dropped.

    A group's score is the standard deviation of its episodes' returns.
        none             every group
        variance_top_p   groups in the order of falling score, until they hold `filter_keep` of the
                         sum of all scores; a group with score 0 never (RAGEN-2, without its slack
                         of 0.01, which depends on the reward's scale)
        variance_top_k   the `filter_keep` share of the groups with the highest scores, at least one
                         (StarPO-S)
        dynamic          every group whose score is not 0 (DAPO)

    Where all groups are dropped the index is empty: the caller decides whether to play more or to
    skip the step.
    """
    groups = score_groups(batch)
    scores = groups.std
    kept = _keep(scores, algorithm)
    rows = kept[groups.group][groups.episodes.episode_of_row].nonzero().squeeze(-1)
    metrics = {
        "filter/groups": float(scores.shape[0]),
        "filter/dropped_groups": float((~kept).sum()),
        "filter/zero_variance_groups": float((scores == 0).sum()),
        "filter/kept_rows": float(rows.shape[0]),
        "filter/score_mean": float(scores.mean()) if scores.numel() else 0.0,
        "filter/score_mean_kept": float(scores[kept].mean()) if bool(kept.any()) else 0.0,
    }
    return rows, metrics


def _keep(scores: Tensor, algorithm: Algorithm) -> Tensor:
    """Which groups to keep: [G] bool."""
    if algorithm.filter == "none":
        return torch.ones_like(scores, dtype=torch.bool)
    if algorithm.filter == "dynamic":
        return scores > 0
    ranked, order = torch.sort(scores, descending=True, stable=True)
    if algorithm.filter == "variance_top_k":
        number = max(1, math.ceil(algorithm.filter_keep * scores.shape[0] - 1e-9))
        chosen = torch.arange(scores.shape[0], device=scores.device) < number
    else:
        before = ranked.cumsum(0) - ranked  # sum of the scores of higher groups
        chosen = (before < algorithm.filter_keep * ranked.sum() * (1 - 1e-9)) & (ranked > 0)
    return torch.zeros_like(chosen).scatter(0, order, chosen)
