"""What test_verifiers_legacy.py runs with verifiers 0.3.1: texts to continue, and rubrics without
reward functions."""

import sys
from pathlib import Path

import pytest
import torch
import verifiers as vf
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from trl_parts import curve, make_trainer

from turnwise.envs.base import EnvError
from turnwise.integrations.trl import VerifiersGRPOTrainer
from turnwise.integrations.trl.sources import make_source
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message

torch.set_num_threads(1)
folder = Path(sys.argv[1])
begun = Dataset.from_list([{"prompt": f"Once {n}", "answer": str(n)} for n in range(4)])
questions = Dataset.from_list([{"question": f"Guess {n}.", "answer": str(n)} for n in range(4)])
seen: list[tuple[str, str]] = []


def continues(prompt, completion, answer, **kwargs) -> float:
    """What verifiers gives a reward function: the text, and the model's message."""
    assert [(one["role"], one["content"]) for one in prompt] == [("text", f"Once {answer}")]
    assert [one["role"] for one in completion] == ["assistant"]
    seen.append((prompt[0]["content"], completion[0]["content"] or ""))
    return float(len(seen) % 2)


def rank(completions, **kwargs) -> list[float]:
    return [0.0] * len(completions)


def double(x: int) -> int:
    """Doubles a number."""
    return 2 * x


class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]


class Watched(VerifiersGRPOTrainer):
    """Keeps what the loss is computed from."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.inputs = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


def texts(make=vf.SingleTurnEnv, *, dataset=begun, funcs=(continues,), **settings):
    rubric = vf.Rubric(funcs=list(funcs))
    return make(message_type="completion", dataset=dataset, rubric=rubric, **settings)


def unmasked(inputs, side) -> list[list[int]]:
    pairs = zip(inputs[f"{side}_ids"], inputs[f"{side}_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


tale = texts()
source = make_source(tale)
env = source.factory()
assert [m.content for m in env.reset(source.task("train", 3)).messages] == ["Once 3"]
assert env.step(Message(role="assistant", content=" upon")).done
assert seen.pop() == ("Once 3", " upon")
source = make_source(texts(dataset=questions, system_prompt="Tell."))
opening = source.factory().reset(source.task("train", 2))
assert [m.content for m in opening.messages] == ["Tell.\n\nGuess 2."]
print("ok texts played")

for template, first in [("none", []), ("chatml", [256])]:
    tokenizer = tiny_tokenizer(template)
    if first:  # a tokenizer with a BOS of its own
        begin = ("<|endoftext|>", first[0])
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[begin]
        )
    trainer = make_trainer(
        folder / f"texts-{template}",
        tale,
        cls=Watched,
        max_completion_length=6,
        max_steps=1,
        trainer={"processing_class": tokenizer},
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert not trainer.multi_turn
    assert any(not torch.equal(before[n], value) for n, value in trainer.model.named_parameters())
    prompts, completions = (unmasked(trainer.inputs, side) for side in ("prompt", "completion"))
    assert len(seen) == len(prompts) == 8
    for prompt_ids, completion_ids in zip(prompts, completions, strict=True):
        text = tokenizer.decode(prompt_ids[len(first) :])
        assert prompt_ids == [*first, *tokenizer.encode(text, add_special_tokens=False)]
        assert (text, tokenizer.decode(completion_ids, skip_special_tokens=True)) in seen
    seen.clear()
    print("ok texts trained", template)

for settings, why in [
    ({"make": Again, "max_turns": 3}, "may ask more than once"),
    ({"funcs": [rank]}, "scores the members of a group together"),
    ({"tool_defs": vf.ToolEnv(tools=[double], dataset=questions).tool_defs}, "has tools"),
]:
    with pytest.raises(EnvError, match=why):
        make_source(texts(**settings))
with pytest.raises(EnvError, match="its member SingleTurnEnv has message_type 'completion'"):
    make_source(vf.EnvGroup(envs=[tale, vf.SingleTurnEnv(dataset=begun)]))
with pytest.raises(ValueError, match="leave out multi_turn"):
    make_trainer(folder / "forced", tale, trainer={"multi_turn": True})
print("ok texts refused")

source = make_source(vf.SingleTurnEnv(dataset=begun, rubric=vf.Rubric(funcs=[continues])))
opening = source.factory().reset(source.task("train", 0))
assert [(m.role, m.content) for m in opening.messages] == [("user", "Once 0")]
print("ok a conversation that begins with a text")

for name, make in [("alone", vf.SingleTurnEnv), ("turns", Again)]:
    with pytest.warns(UserWarning, match=f"the rubric of {make.__name__} has no reward function"):
        trainer = make_trainer(
            folder / name, make(dataset=questions), max_completion_length=60, max_turns=2
        )
    trainer.train()
    trainer.close()
    assert curve(trainer) == [0.0, 0.0]
    print("ok unscored", name)
