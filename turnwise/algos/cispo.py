"""CISPO (arXiv 2506.13585): GRPO with a clipped, constant weight on log-probs, so that no token
loses its gradient."""

from dataclasses import replace

from turnwise.algos.grpo import GRPO

CISPO = replace(
    GRPO, name="cispo", surrogate="cispo", reduction="token_mean", clip_low=1.0, clip_high=4.0
)
