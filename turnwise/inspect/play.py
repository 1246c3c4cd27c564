"""Games in the browser."""

from turnwise.inspect.runs import Runs
from turnwise.types import Json


class Games:
    """Games that people play or watch."""

    runs: Runs | None = None

    def close(self) -> None: ...

    def choices(self) -> Json: ...

    def view(self, game: str) -> Json: ...

    async def start(self, body: dict[str, Json]) -> Json: ...

    async def step(self, game: str, body: dict[str, Json]) -> Json: ...

    async def end(self, game: str) -> Json: ...
