"""Programs with two roles, for tests of the backends."""

from typing import Any


def team(client: Any) -> dict[str, dict[str, float]]:
    """Pays the player by the length of its reply, and the judge by that of its own, at once."""
    return _play(client, "judge", "player")


def player_first(client: Any) -> dict[str, dict[str, float]]:
    """The same, where the judge has the last word."""
    return _play(client, "player", "judge")


def _play(client: Any, *roles: str) -> dict[str, dict[str, float]]:
    paid: dict[str, float] = {}
    for role in roles:
        said = [{"role": "user", "content": "Say something."}]
        answer = client.chat.completions.create(model=f"policy:{role}", messages=said)
        paid[role] = float(len(answer.choices[0].message.content or ""))
    return {"reward": paid}
