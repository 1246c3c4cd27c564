"""The outcome of a run, for summary.json, and from its metrics while it runs."""

from collections.abc import Mapping, Sequence

from turnwise.log.events import Evaluated
from turnwise.types import Json


def stored_outcome(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Json]:
    """The outcome so far, from the metrics: a run that goes on has no summary.

    Example:
        >>> found = stored_outcome([{"step": 0, "eval/reward": 0.5, "eval/episodes": 8.0}])
        >>> found["before"]["episodes"], found["before"]["success"]
        (8, None)
    """
    played = [row for row in rows if row.get("eval/reward") is not None]
    found: dict[str, Json] = {}
    for label, row in zip(("before", "after"), played[:1] + played[1:][-1:], strict=False):
        share = [row.get(f"eval/success{end}") for end in ("_low", "", "_high")]
        found[label] = {
            "step": row["step"],
            "label": label if label == "before" else "during",
            "episodes": int(row.get("eval/episodes") or 0),
            "success": None if None in share else share,
            "reward": [row.get(f"eval/reward{end}") for end in ("_low", "", "_high")],
        }
    return found


def steps_done(rows: Sequence[Mapping[str, float | None]]) -> int:
    """Steps of training, or of imitation, that these metrics tell of.

    Example:
        >>> steps_done([{"step": 0, "eval/reward": 0.5}, {"step": 3, "sft/loss": 0.1}])
        3
    """
    done = [int(row["step"] or 0) for row in rows if "rollout/reward" in row or "sft/loss" in row]
    return max(done, default=0)


def summary_json(
    before: Evaluated | None, after: Evaluated | None, **facts: Json
) -> dict[str, Json]:
    """The content of summary.json.

    Example:
        >>> summary_json(None, None, seconds=3)
        {'before': None, 'after': None, 'seconds': 3}
    """
    return {
        "before": None if before is None else before.to_json(),
        "after": None if after is None else after.to_json(),
        **facts,
    }
