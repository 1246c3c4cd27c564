"""GSPO (arXiv 2507.18071): GRPO with one importance ratio per sequence, the geometric mean over its
tokens."""

from dataclasses import replace

from turnwise.algos.grpo import GRPO

GSPO = replace(
    GRPO,
    name="gspo",
    ratio_level="sequence",
    reduction="sequence_mean",
    clip_low=3e-4,
    clip_high=4e-4,
)
