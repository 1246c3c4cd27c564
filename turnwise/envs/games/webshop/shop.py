"""A shop: its products, their prices, the goals, and the search. Loaded once and shared by all
environments."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from turnwise.envs.games.webshop.catalog import Product, ProductError, read_products
from turnwise.envs.games.webshop.goals import (
    SHUFFLE_SEED,
    Goal,
    GoalKind,
    draw_prices,
    make_goals,
    split_goals,
)
from turnwise.envs.tools.bm25 import BM25Index
from turnwise.json_lines import read_json

MAX_RESULTS = 50
SAMPLE = Path(__file__).with_name("sample_products.json")
"""A small catalogue made up for turnwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shop:
    """Products, prices, goals and search index, which do not change while shopping."""

    products: Mapping[str, Product]
    prices: Mapping[str, float]
    goals: Mapping[str, Sequence[Goal]]
    """By split: train, val, test."""
    num_goals: int
    """All goals, before those that ask for the same were left out."""
    index: BM25Index
    nouns: Mapping[str, Sequence[str]] | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shop":
        """Itself: a copy of an environment shops in the same shop."""
        return self

    def search(self, query: str) -> tuple[Product, ...]:
        """The best matches, at most 50."""
        asins = list(self.products)
        return tuple(
            self.products[asins[number]]
            for number, _ in self.index.search(query, limit=MAX_RESULTS)
        )


def load_shop(
    products: str | Path | None = None,
    *,
    attributes: str | Path | None = None,
    title_nouns: str | Path | None = None,
    goals: GoalKind = "synthetic",
) -> Shop:
    """The shop of these files; without any, the small one that comes with turnwise.

    `products` may be a directory: it then holds one file whose name begins with "products" or
    "items_shuffle", and perhaps one that begins with "items_ins" (attributes) and one called
    title_nouns.json.
    """
    files = [
        None if path is None else Path(path).expanduser()
        for path in (products, attributes, title_nouns)
    ]
    if files[0] is not None and files[0].is_dir():
        folder = files[0]
        files[0] = _one_of(folder, "products", "items_shuffle")
        files[1] = files[1] or _one_of(folder, "items_ins", optional=True)
        files[2] = files[2] or _one_of(folder, "title_nouns", optional=True)
    return _load(files[0] or SAMPLE, files[1], files[2], goals)


@lru_cache(maxsize=4)
def _load(products: Path, attributes: Path | None, nouns: Path | None, kind: GoalKind) -> Shop:
    catalog = read_products(products, attributes=attributes)
    rng = random.Random(SHUFFLE_SEED)
    prices = draw_prices(catalog, rng)
    goals = make_goals(catalog, prices, kind=kind, rng=rng)
    return Shop(
        products={product.asin: product for product in catalog},
        prices=prices,
        goals=split_goals(goals),
        num_goals=len(goals),
        index=BM25Index([product.search_text for product in catalog]),
        nouns=None if nouns is None else _read_nouns(nouns),
    )


def _one_of(folder: Path, *prefixes: str, optional: bool = False) -> Path | None:
    found = sorted(file for prefix in prefixes for file in folder.glob(f"{prefix}*.json*"))
    if len(found) > 1 or (not found and not optional):
        names = ", ".join(file.name for file in found) or "none"
        raise ProductError(
            f"{folder} holds one file that begins with {' or '.join(prefixes)}, found {names}; "
            "name the file itself"
        )
    return found[0] if found else None


def _read_nouns(path: Path) -> dict[str, list[str]]:
    loaded: Any = read_json(path, lambda data: data)
    if not isinstance(loaded, dict) or not all(
        isinstance(words, list) for words in cast(dict[str, Any], loaded).values()
    ):
        raise ProductError(f"{path} maps product ids to lists of nouns")
    return cast(dict[str, list[str]], loaded)
