"""Keys of other projects about data files, their rewards, passes over them and nodes. Functions as
in `combinations.py`."""

from typing import Any, cast

from turnwise.config.dialects.rules import Note
from turnwise.config.dialects.runs import flag
from turnwise.config.tree import Tree, get_path, is_tree

FILES = ("data.train_files", "data.val_files", "data.image_key")
REWARD = "reward_model.reward_manager"
BUFFERS = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
OVERRIDES = "actor_rollout_ref.model.override_config"
PLACES = (
    "trainer.n_gpus_per_node",
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in (
            *("name", "tensor_model_parallel_size", "gpu_memory_utilization"),
            *("max_num_batched_tokens", "enable_chunked_prefill"),
        )
    ),
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref.fsdp_config",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
)
"""Where and how fast verl runs; of use to several nodes alone."""
_BY_RULE = ("naive", "dapo")
"""verl's reward managers that compare with the answer beside the prompt."""


def files(facts: Tree, seen: Tree, note: Note) -> Tree:
    """verl's parquet files and align-anything's data sets. With an environment, they only count
    tasks."""
    given = [key for key, value in facts.items() if value and key not in ("env.env_name", REWARD)]
    if "env.env_name" in facts:
        for key in given:
            if key == "data.image_key":
                raise ValueError("data.image_key: environments show text, not images")
            note(key, "tasks come from the environment: data.train_batch_size says how many")
        return {}
    if not given or get_path(seen, "data.prompts") is not None:
        return {}
    if facts.get(REWARD) not in _BY_RULE or "data.train_files" not in given:
        raise ValueError(
            "prompts are read from a JSONL or parquet file, and scored by a function: set "
            "data.prompts = FILE and data.reward = file.py:function"
        )
    if "data.image_key" in given:
        raise ValueError("data.image_key: prompts are text, not images")
    settings: Tree = {"data.prompts": _one(facts["data.train_files"])}
    if facts.get("data.val_files"):
        settings["data.val_prompts"] = _one(facts["data.val_files"])
        note("data.val_files", "an evaluation draws eval.episodes prompts from it")
    note("data.train_files", "prompts are drawn at random; verl passes over them in turn")
    note(REWARD, "the answer is compared as a number or as text, in more spellings than in verl")
    return {
        **settings,
        "data.reward": "exact",
        "data.answer_column": "reward_model.ground_truth",
        "train.multi_turn": False,
    }


def _one(value: Any) -> str:
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(f"prompts are read from one file, got {value!r}; join them")
    return names[0]


def epochs(facts: Tree, seen: Tree, note: Note) -> Tree:
    """An environment has no end, so an epoch is one rollout; a file has one."""
    number = facts["trainer.total_epochs"]
    on_files = facts.get("data.train_files") and "env.env_name" not in facts
    if not on_files and get_path(seen, "data.prompts") is None:
        return {"train.steps": number}
    if facts.get("trainer.total_training_steps"):
        note("trainer.total_epochs", "trainer.total_training_steps says when training ends")
        return {}
    return {"data.epochs": number}


def overlong(facts: Tree, seen: Tree, note: Note) -> Tree:
    """DAPO's soft punishment of replies near their limit."""
    found = [key for key in BUFFERS if f"{key}.enable" in facts or f"{key}.len" in facts]
    if not found:
        raise ValueError("an overlong buffer needs enable, len and penalty_factor")
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} set the same buffer; keep one")
    (key,) = found
    if not flag(facts, f"{key}.enable"):
        return {"env.shaping.overlong_tokens": 0}
    longest = facts.get("reward_model.reward_kwargs.max_resp_len")
    limit = get_path(seen, "rollout.max_response_tokens")
    if longest is not None and longest != limit:
        raise ValueError(
            "reward_model.reward_kwargs.max_resp_len must be data.max_response_length: the buffer "
            f"ends at rollout.max_response_tokens = {limit}, got {longest!r}"
        )
    tokens, penalty = (facts.get(f"{key}.{name}") for name in ("len", "penalty_factor"))
    if not isinstance(tokens, int) or not isinstance(penalty, int | float):
        raise ValueError(f"{key} needs len and penalty_factor, got {tokens!r} and {penalty!r}")
    return {
        "env.shaping.overlong_tokens": tokens,
        "env.shaping.overlong_penalty": float(penalty),
    }


def nodes(facts: Tree, seen: Tree, note: Note) -> Tree:
    """Several nodes are verl's: its settings of place and speed go there."""
    number = facts.get("trainer.nnodes", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"trainer.nnodes is a number of machines, got {number!r}")
    if number == 1 or facts.get("backend") == "native":
        if number > 1:
            note("trainer.nnodes", "the native trainer runs on one device")
        if OVERRIDES in facts:
            raise ValueError(
                f"{OVERRIDES} means nothing to backend 'native'; set backend: verl, or remove it"
            )
        return {}
    for_all = {key: facts[key] for key in PLACES if key in facts and "$" not in str(facts[key])}
    gpus = for_all.pop("trainer.n_gpus_per_node", None)
    started = f"--nodes {number}" + (f" --gpus {gpus}" if gpus else "")
    note(
        "trainer.nnodes", f"several nodes need backend verl, started with {started}: docs/scale.md"
    )
    if gpus is not None:
        note("trainer.n_gpus_per_node", f"given on the command line: {started}")
    if OVERRIDES in facts:
        for_all[OVERRIDES] = facts[OVERRIDES]
    passed = _flat(for_all)
    for key in for_all:
        note(key, "passed on to verl")
    return {"backend": "verl", **({"verl": passed} if passed else {})}


def _flat(tree: Tree) -> Tree:
    found: Tree = {}
    for key, value in tree.items():
        if is_tree(value):
            found |= {f"{key}.{name}": inner for name, inner in _flat(cast(Tree, value)).items()}
        else:
            found[key] = value
    return found
