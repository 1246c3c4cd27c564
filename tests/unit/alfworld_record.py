"""Records what the original ALFWorld shows, as digests per game: `python alfworld_record.py
GAMES.jsonl.gz`.

Needs the extra `alfworld`. The digests let the suite check the plain engine against the original
without it, and without keeping any of the games' text.
"""

import json
import sys
from pathlib import Path

from turnwise.envs.games.alfworld.check import digest, follow, make_engine, wander
from turnwise.envs.games.alfworld.games import Game, load_games

DIGESTS = Path(__file__).with_name("alfworld_digests.json")
STEPS = 60


def transcripts(game: Game, *, engine: str) -> list[str]:
    """Digests of the walkthrough and of a random walk."""
    player = make_engine(game, engine=engine)
    try:
        return [
            digest(follow(player, game.walkthrough)),
            digest(wander(player, seed=f"{game.id}/a", steps=STEPS)),
        ]
    finally:
        player.close()


def main() -> None:
    games = load_games(sys.argv[1])
    recorded = {game.id: transcripts(game, engine="textworld") for game in games}
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(recorded.items())
    )
    DIGESTS.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
