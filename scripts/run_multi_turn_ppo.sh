#!/usr/bin/env bash
# Multi-turn PPO with bi-level GAE on FrozenLake. Further words are passed on, and a flag given again wins:
# scripts/run_multi_turn_ppo.sh --train_cfgs.max_turn 5 --seed 1
set -euo pipefail

ours="$(dirname "$0")/../.venv/bin/python"
PYTHON=${PYTHON:-$([ -x "$ours" ] && echo "$ours" || echo python3)}

exec "$PYTHON" -m turnwise.trainers.ppo_multi_turn \
    --train_cfgs.multi_turn true \
    --train_cfgs.bi_level_gae true \
    --train_cfgs.high_level_gamma 0.95 \
    --train_cfgs.max_turn 3 \
    --env_cfgs.env_name frozen_lake \
    "$@"
