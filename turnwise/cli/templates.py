"""The files that `turnwise init` writes: working environments, each with a test, two configs and a
README line. CLASS, FILE and KIND are placeholders."""

GAME = '''"""CLASS: walk along a corridor to the lamp, and take it."""

from turnwise import BaseEnv


class CLASS(BaseEnv):
    instruction = "Walk to the lamp, then take it."
    actions = ("left", "right", "take")
    expert = "shortest way"

    def __init__(self, length=5):
        self.length = length

    def reset(self, seed=None, **kwargs):
        seed = seed or 0
        self.place, self.lamp = seed % self.length, seed // self.length % self.length
        return self._look()

    def step(self, action):
        if action == "take":
            won = self.place == self.lamp
            return "You have it." if won else "Nothing here.", float(won), True, {"success": won}
        move = 1 if action == "right" else -1
        self.place = min(max(self.place + move, 0), self.length - 1)
        return self._look(), 0.0, False, {}

    def expert_action(self):
        """The best action: reports show the expert's result. Remove it if you know none."""
        if self.place == self.lamp:
            return "take"
        return "right" if self.place < self.lamp else "left"

    def _look(self):
        if self.place == self.lamp:
            return "The lamp is here."
        return f"The lamp is {'right' if self.place < self.lamp else 'left'} of you."
'''

TOOLS = '''"""CLASS: answer questions about a shop with the result of a tool."""

import random

from turnwise import Rubric, ToolEnv

ITEMS = ("apples", "pears", "plums", "figs")


def exact(text, answer):
    """1 if the last reply is the answer."""
    return float(text.strip() == answer)


class CLASS(ToolEnv):
    expert = "asks, then answers"

    def __init__(self):
        super().__init__(
            tools=[self.stock],
            rubric=Rubric([exact]),
            system_prompt="Ask the tool, then reply with the number alone.",
            max_turns=3,
            success="exact",
        )

    def make_row(self, seed, split):
        """The task of a seed. Tasks of "train" and "val" differ by their seeds."""
        rng = random.Random(f"{split}/{seed}")
        stocks = {item: rng.randint(1, 9) for item in ITEMS}
        item = rng.choice(ITEMS)
        return {
            "prompt": f"How many {item} are there?",
            "answer": str(stocks[item]),
            "info": {"item": item, "stocks": stocks},
        }

    def setup_state(self, state):
        self.shelf = state["info"]["stocks"]
        return state

    def stock(self, item: str) -> int:
        """Says how many of an item there are.

        Args:
            item: apples, pears, plums or figs
        """
        return self.shelf[item]

    def random_reply(self, rng, messages, state):
        """Imitated by the embedded model before training: the format, and often the right item."""
        if messages[-1]["role"] == "tool" and rng.random() < 0.8:
            return messages[-1]["content"]
        return self._call(rng.choice((state["info"]["item"], rng.choice(ITEMS))))

    def expert_reply(self, messages, state):
        """The best reply: reports show the expert's result. Remove it if you know none."""
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        return self._call(state["info"]["item"])

    def _call(self, item):
        return f'<tool_call>{{"name": "stock", "arguments": {{"item": "{item}"}}}}</tool_call>'
'''

CHAT = '''"""CLASS: a guest says what to bring only when asked."""

import random

from turnwise import MultiTurnEnv

DRINKS = ("tea", "coffee", "milk")
ASK = "What would you like?"


class CLASS(MultiTurnEnv):
    expert = "asks, then brings it"

    def __init__(self):
        super().__init__(
            system_prompt=f"Ask the guest: {ASK} Then say what you bring, as in: Here is tea.",
            max_turns=3,
        )

    def make_row(self, seed, split):
        """The task of a seed. Tasks of "train" and "val" differ by their seeds."""
        drink = random.Random(f"{split}/{seed}").choice(DRINKS)
        return {"prompt": "Good morning.", "answer": drink}

    def is_completed(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if not said.startswith("Here is"):
            return False
        state["success"] = said == f"Here is {state['answer']}."
        state["turn_reward"] = float(state["success"])
        return True

    def env_response(self, messages, state, **kwargs):
        asked = messages[-1]["content"] == ASK
        reply = f"Some {state['answer']}, please." if asked else "Pardon?"
        return [{"role": "user", "content": reply}], state

    def random_reply(self, rng, messages, state):
        """Imitated by the embedded model before training: the format, the order half the time."""
        if rng.random() < 0.5:
            return ASK
        heard = state["answer"] if len(messages) > 3 else rng.choice(DRINKS)
        return f"Here is {rng.choice((heard, rng.choice(DRINKS)))}."

    def expert_reply(self, messages, state):
        """The best reply: reports show the expert's result. Remove it if you know none."""
        return ASK if len(messages) < 3 else f"Here is {state['answer']}."
'''

PROMPTS = '''"""CLASS: questions from FILE.jsonl, one reply each; a fifth is held out."""

from pathlib import Path

from turnwise import Rubric, SingleTurnEnv

DATA = Path(__file__).with_name("FILE.jsonl")


def exact(text, answer):
    """1 if the reply is the answer."""
    return float(text.strip() == answer)


class CLASS(SingleTurnEnv):
    expert = "answer"

    def __init__(self, data=str(DATA)):
        super().__init__(
            data,
            Rubric([exact]),
            system_prompt="Reply with the number alone.",
            val_fraction=0.2,
            success="exact",
        )

    def random_reply(self, rng, messages, state):
        """Imitated by the embedded model before training: one of the numbers, right or wrong."""
        return rng.choice([letter for letter in messages[-1]["content"] if letter.isdigit()])

    def expert_reply(self, messages, state):
        """The best reply: reports show the expert's result. Remove it if you know none."""
        return state["answer"]
'''

TEST = '''"""The environment passes check-env, the expert wins, and a random player does not."""

import turnwise

NAME = "FILE.py:CLASS"
CONFIG = "FILE_small.yaml"


def test_the_contract():
    report = turnwise.check_env(NAME)
    assert report.ok, str(report)


def test_the_expert_wins_and_a_random_player_does_not():
    expert = turnwise.evaluate("expert", config=CONFIG, episodes=32)
    assert expert.success.estimate == 1.0
    random = turnwise.evaluate("random", config=CONFIG, episodes=32)
    assert random.success.estimate < 0.9
'''

CONFIG = """# CLASS, for your model: turnwise train FILE.yaml model.path=DIR
env:
  name: FILE.py:CLASS
train:
  max_turn: TURNS
  steps: 100
"""

SMALL = """# CLASS with the embedded small model: turnwise train FILE_small.yaml
extends: FILE.yaml
model:
  embedded:
    hidden_size: 48
    num_layers: 3
    num_heads: 3
    warmstart_episodes: 4000
    warmstart_epochs: 1
    warmstart_observations: true
env:
  format: {style: raw, think: false, max_actions_per_turn: 1, reminder: never}
rollout:
  train: {env_groups: 16, group_size: 8}
  max_response_tokens: REPLY
  max_context: 512
  slots: 128
  eval_temperature: 1.0
algo:
  name: grpo
train:
  steps: 40
  epochs: 2
  mini_batches: 2
  lr: 5.0e-4
  schedule: linear
  warmup_steps: 5
  max_grad_norm: 0.5
eval:
  episodes: 128
  baselines: true
"""

README = """CLASS is an environment for turnwise: `turnwise check-env FILE.py:CLASS`,
`pytest test_FILE.py`, `turnwise play FILE.py:CLASS`, `turnwise train FILE_small.yaml` (embedded
model), `turnwise train FILE.yaml model.path=DIR` (your model).
"""

PARTS = '''"""Parts of your own, named in FILE_small.yaml and on the command line."""

import torch

import turnwise


def above_group(rewards, mask, group_ids):
    """An advantage estimator: the episode's return minus its group's mean."""
    returns = torch.where(mask, rewards, 0.0).sum(-1)
    mean = torch.stack([returns[group_ids == group].mean() for group in group_ids])
    return torch.where(mask, (returns - mean)[:, None], 0.0)


def reinforce(ratio, advantages):
    """A policy loss, per token."""
    return -ratio * advantages


def brevity(text):
    """A reward shaper: its result is added to every turn's reward."""
    return -0.001 * len(text)


class Solved(turnwise.Callback):
    """Ends the run when the task is solved."""

    def on_step(self, step, metrics):
        if metrics.get("rollout/success", 0.0) > 0.99:
            raise turnwise.StopTraining("solved")
'''

PARTS_TEST = '''"""Our own parts pass turnwise's checks."""

from turnwise.algos import build_algorithm
from turnwise.config.schema import AlgoConfig


def test_estimator_and_loss_are_sound():
    config = AlgoConfig(name="parts.py:above_group", surrogate="parts.py:reinforce")
    algorithm = build_algorithm(config)
    assert algorithm.needs_groups
'''

GROUP_ALGO = "  name: grpo\n"
OWN_ALGO = "  name: parts.py:above_group\n  surrogate: parts.py:reinforce\n"

PROMPT_ROWS = "".join(
    f'{{"prompt": "Which is larger, {a} or {b}?", "answer": "{max(a, b)}"}}\n'
    for a in range(10)
    for b in range(10)
    if a != b
)

ENVIRONMENTS = {"game": GAME, "tools": TOOLS, "chat": CHAT, "prompts": PROMPTS}
TURNS = {"game": 8, "tools": 3, "chat": 3, "prompts": 1}
REPLY = {"game": 3, "tools": 48, "chat": 12, "prompts": 3}


def files(kind: str, *, file: str, name: str) -> dict[str, str]:
    """Path -> text of everything that one environment needs.

    Example:
        >>> sorted(files("game", file="lamp", name="Lamp"))
        ['README.md', 'lamp.py', 'lamp.yaml', 'lamp_small.yaml', 'test_lamp.py']
    """
    found = {
        f"{file}.py": ENVIRONMENTS[kind],
        f"test_{file}.py": TEST,
        f"{file}.yaml": CONFIG,
        f"{file}_small.yaml": SMALL,
        "README.md": README,
    }
    if kind == "prompts":
        found[f"{file}.jsonl"] = PROMPT_ROWS
    numbers = {"TURNS": TURNS[kind], "REPLY": REPLY[kind]}
    for path, text in found.items():
        for word, value in {"CLASS": name, "FILE": file, **numbers}.items():
            text = text.replace(word, str(value))
        found[path] = text
    return found


def project_files(*, file: str, name: str) -> dict[str, str]:
    """Path -> text of a project: an environment, your own parts, their tests and configs."""
    found = files("game", file=file, name=name)
    small = found[f"{file}_small.yaml"]
    assert GROUP_ALGO in small
    small = small.replace(GROUP_ALGO, OWN_ALGO)
    return {
        **found,
        f"{file}_small.yaml": small + "log:\n  callbacks: [parts.py:Solved]\n",
        "parts.py": PARTS.replace("FILE", file),
        "test_parts.py": PARTS_TEST,
        ".gitignore": "runs/\n__pycache__/\n",
    }
