"""Multi-turn PPO with bi-level GAE, with short flags.

    python examples/run_multi_turn_ppo.py --multi_turn true --bi_level_gae true --max_turn 3
    --learning_rate 5e-7

A short flag is a key of `train_cfgs`, `env_cfgs` or `model_cfgs` without its section; every dotted
key of turnwise is taken as well, such as --train.steps 20.
"""

from turnwise.trainers.ppo_multi_turn import main

if __name__ == "__main__":
    main()
