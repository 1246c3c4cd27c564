"""DAPO (arXiv 2503.14476): GRPO with a wider upper clip, a mean over tokens, and only groups that
differ in reward."""

from dataclasses import replace

from turnwise.algos.grpo import GRPO

DAPO = replace(GRPO, name="dapo", clip_high=0.28, filter="dynamic", reduction="token_mean")
