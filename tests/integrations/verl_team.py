"""A program with two roles, for tests of the verl backend."""

from typing import Any


def team(client: Any) -> dict[str, dict[str, float]]:
    """Pays the player by the length of its reply, and the judge by that of its own, at once."""
    paid: dict[str, float] = {}
    for role in ("judge", "player"):
        said = [{"role": "user", "content": "Say something."}]
        answer = client.chat.completions.create(model=f"policy:{role}", messages=said)
        paid[role] = float(len(answer.choices[0].message.content or ""))
    return {"reward": paid}
