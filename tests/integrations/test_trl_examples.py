"""The first examples that people see, as they are written: single turns, tools, a custom
environment, migration."""

import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.testing.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

COMMON = """
from turnwise.envs import MultiTurnEnv, SingleTurnEnv, ToolEnv
from turnwise.envs import Rubric
from turnwise.trainers import VerifiersGRPOTrainer, VerifiersGRPOConfig

your_dataset = [{"prompt": "How many?", "answer": "2"}, {"prompt": "How few?", "answer": "1"}]
def right(text, answer):
    return float(answer in text)
your_rubric = Rubric([right])
"""

SINGLE = """
env = SingleTurnEnv(dataset=your_dataset, rubric=your_rubric)
trainer = VerifiersGRPOTrainer(
    model="your-model",
    env=env,
    args=VerifiersGRPOConfig("single-turn-run")
)
trainer.train()
assert not trainer.multi_turn
"""

TOOLS = """
def my_tool(query: str) -> str:
    return f"Result for {query}"

env = ToolEnv(
    tools=[my_tool],
    dataset=your_dataset,
    system_prompt="You can use tools to help answer questions."
)
trainer = VerifiersGRPOTrainer(
    model="your-model",
    env=env,
    args=VerifiersGRPOConfig("multi-turn-run")
)
trainer.train()
assert trainer.multi_turn
"""

CUSTOM = """
class CustomMultiTurnEnv(MultiTurnEnv):
    def is_completed(self, messages, state, **kwargs):
        # Custom completion logic
        return len(messages) >= 5

    def env_response(self, messages, state, **kwargs):
        # Custom environment response
        response = {"role": "user", "content": "Environment feedback"}
        return [response], state

env = CustomMultiTurnEnv(dataset=your_dataset)
trainer = VerifiersGRPOTrainer(model="your-model", env=env)
trainer.train()
assert trainer.multi_turn
assert trainer.args.output_dir.endswith("your-model-GRPO")
"""

CONFIG = """
config = VerifiersGRPOConfig(
    "run-name",
    # Standard TRL parameters
    learning_rate=1e-6,
    per_device_train_batch_size=8,

    # Verifiers-specific parameters
    num_batches_ahead=1,           # Async batch generation
    enable_async_generation=True,   # Enable async capabilities
    async_timeout=300,             # Timeout for generation
    max_steps=3,
)
class Chat(MultiTurnEnv):
    def is_completed(self, messages, state, **kwargs):
        return len(messages) >= 5
    def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Go on."}], state
trainer = VerifiersGRPOTrainer(model="your-model", env=Chat(dataset=your_dataset), args=config)
trainer.train()
assert trainer.async_generation
"""


def run(code, folder):
    command = [sys.executable, "-c", code]
    env = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
    }
    env |= {"HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "code", [SINGLE, TOOLS, CUSTOM, CONFIG], ids=["single", "tools", "custom", "config"]
)
def test_as_written(tmp_path, code):
    tiny_model().save_pretrained(tmp_path / "your-model")
    tiny_tokenizer().save_pretrained(tmp_path / "your-model")
    run(COMMON + code, tmp_path)


@pytest.mark.parametrize(
    "name", ["trl_single_turn.py", "trl_tools.py", "trl_three_turns.py", "trl_taskset.py"]
)
def test_example_files(tmp_path, name):
    if name == "trl_taskset.py":
        pytest.importorskip("verifiers.v1")
    command = [sys.executable, str(ROOT / "examples" / name), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-4000:]
