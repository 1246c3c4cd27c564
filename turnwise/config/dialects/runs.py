"""Keys of other projects that say what a run does: whether it only evaluates, how an evaluation
samples, what it resumes, and when it ends. Functions as in `combinations.py`."""

from turnwise.config.dialects.rules import Note
from turnwise.config.tree import Tree

ROLLOUT = "actor_rollout_ref.rollout"
VAL = f"{ROLLOUT}.val_kwargs"
RESUMES = ("trainer.resume_mode", "trainer.resume_from_path")
_WEIGHTS = "the weights to evaluate: set model.path to them, a folder in Hugging Face's form"


def flag(facts: Tree, key: str) -> bool | None:
    """The value of a switch, None where it is not given."""
    value = facts.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {key} = {value!r}")
    return value


def purpose(facts: Tree, seen: Tree, note: Note) -> Tree:
    """verl evaluates and ends under `val_only`. What it loads is of its own form."""
    resumed = [
        key
        for key in RESUMES
        if facts.get(key) is not None and facts[key] not in ("disable", "auto")
    ]
    if not flag(facts, "trainer.val_only"):
        if resumed:
            raise ValueError(
                f"{resumed[0]} = {facts[resumed[0]]!r} means nothing here: `turnwise train "
                "--resume RUN` goes on with a run. Remove the key"
            )
        return {}
    note("trainer.val_only", "`turnwise eval FILE` evaluates; `turnwise train FILE` trains")
    for key in resumed:
        note(key, _WEIGHTS)
    if not resumed and "trainer.default_local_dir" in facts:
        note("trainer.default_local_dir", _WEIGHTS)
    return {}


def sampling(facts: Tree, seen: Tree, note: Note) -> Tree:
    """How an evaluation samples. Without `val_kwargs`, it samples as the rollout does."""
    greedy = facts.get(f"{ROLLOUT}.do_sample") is False
    if greedy and not flag(facts, "trainer.val_only"):
        raise ValueError(
            f"{ROLLOUT}.do_sample = False means nothing here: training samples at "
            "rollout.temperature. Remove the key"
        )
    sampled = facts.get(f"{VAL}.do_sample")
    if greedy and sampled is not None:
        note(f"{ROLLOUT}.do_sample", f"{VAL}.do_sample says how an evaluation samples")
    if sampled is False or (greedy and sampled is None):
        return {"rollout.eval_temperature": 0.0}
    temperature = facts.get(f"{VAL}.temperature")
    return {} if temperature is None else {"rollout.eval_temperature": temperature}


def steps(facts: Tree, seen: Tree, note: Note) -> Tree:
    """An evaluation may have no steps."""
    number = facts["trainer.total_training_steps"]
    if number == 0 and flag(facts, "trainer.val_only"):
        note("trainer.total_training_steps", "`turnwise eval FILE` takes no step", moot=True)
        return {}
    return {"train.steps": number}
