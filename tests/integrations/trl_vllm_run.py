"""What test_trl_vllm.py runs with a real vLLM: `python trl_vllm_run.py FOLDER SETTINGS`; writes
FOLDER/RANK.json.

Trainings on the model in FOLDER/model: `multi`, episodes of one to three turns; `single`, TRL's own
path; `stale`, several turns and no weights sent after the first time, which shows what the
comparison of log-probs is worth; `narrow`, conversations that outgrow what vLLM has room for.
"""

import json
import os
import sys
from pathlib import Path

import torch
from trl_parts import ThreeTurns, curve, make_trainer
from trl_vllm_plugin import one_small_llm, register, trainer_side

from turnwise.envs.messages import Rubric, SingleTurnEnv
from turnwise.integrations.trl import VerifiersGRPOTrainer
from turnwise.testing.tiny import tiny_tokenizer


class Ragged(ThreeTurns):
    """Episodes of one to three turns."""

    def is_completed(self, messages, state, **kwargs):
        return (
            super().is_completed(messages, state, **kwargs)
            or state["turn"] >= 1 + state["info"]["n"] % 3
        )


class Talkative(ThreeTurns):
    """Says so much that some conversations have no room for a third turn, and some none for a
    second."""

    def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "x" * (40 + 20 * state["info"]["n"])}], state


class Recording(VerifiersGRPOTrainer):
    """Keeps what TRL is about to train on."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].bool()
        if "tool_mask" in output:
            mask &= output["tool_mask"].bool()
        kept = {"trained": int(mask.sum()), "gap": self.gap(output, mask)}
        if self.multi_turn:
            kept |= self.compare(output, mask)
        self.__dict__.setdefault("kept", []).append(kept)
        return output

    def compare(self, output, mask):
        """Whether ids and log-probs of every row are those that its turns were sampled with."""
        turns = [row.episode.turns for row in self._rows]
        ids = [output["completion_ids"][index][mask[index]].tolist() for index in range(len(turns))]
        logprobs = [
            output["sampling_per_token_logps"][index][mask[index]] for index in range(len(turns))
        ]
        return {
            "turns": [len(one) for one in turns],
            "same_ids": ids
            == [[token for turn in one for token in turn.completion.ids] for one in turns],
            "same_logprobs": all(
                torch.equal(
                    found,
                    torch.tensor([value for turn in one for value in turn.completion.logprobs]),
                )
                for found, one in zip(logprobs, turns, strict=True)
            ),
            "reasons": sorted({turn.completion.finish_reason for one in turns for turn in one}),
            "statuses": sorted({row.episode.status.value for row in self._rows}),
            "longest": max(len(row.prompt_ids) + len(row.completion_ids) for row in self._rows),
            "failed": sum(row.failed for row in self._rows),
        }

    @torch.no_grad()
    def gap(self, output, mask):
        """Largest difference between the sampler's log-probs and those that the trainer's weights
        give now."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        logits = (
            self.model(input_ids=ids, attention_mask=attention).logits[:, :-1] / self.temperature
        )
        width = output["completion_ids"].shape[1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, -width:, 0]
        return float((logprobs - output["sampling_per_token_logps"])[mask].abs().max())


def length(text: str) -> float:
    return float(len(text))


def run(what: str, folder: Path, vllm: dict) -> dict:
    env = Talkative() if what == "narrow" else Ragged()
    if what == "single":
        env = SingleTurnEnv(
            [{"question": f"{n}?"} for n in range(8)], Rubric([length]), val_fraction=0.0
        )
    trainer = make_trainer(
        folder / what,
        env,
        cls=Recording,
        model=str(folder / "model"),
        trainer={"processing_class": tiny_tokenizer()},
        use_vllm=True,
        max_steps=4,
        max_tokens_per_turn=40 if what == "narrow" else 6,
        max_completion_length=600 if what == "narrow" else 64,
        learning_rate=1e-2,
        temperature=0.8,
        async_timeout=240,
        env_timeout=240,
        **vllm,
    )
    limits = []
    engine = trainer.vllm_generation
    generate, sync = engine.generate, engine.sync_weights

    def counted(prompts, *args, **kwargs):
        limits.append([len(prompts), engine.max_completion_length])
        return generate(prompts, *args, **kwargs)

    engine.generate = counted
    if what == "stale":
        engine.sync_weights = lambda: sync() if trainer.state.global_step == 0 else None
    trainer.train()
    trainer.close()
    return {
        "steps": trainer.kept,
        "multi_turn": trainer.multi_turn,
        "rounds": limits,
        "loss": curve(trainer, "loss"),
        "difference": curve(trainer, "sampling/sampling_logp_difference/max"),
    }


def main() -> None:
    folder, vllm = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if vllm["vllm_mode"] == "server":
        trainer_side()
    else:
        register()
        one_small_llm()
    # A group's port stays taken as long as the process lives, so every training needs its own.
    ports = vllm.pop("ports")
    result = {
        what: run(what, folder, {**vllm, "vllm_group_port": port}) for what, port in ports.items()
    }
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
