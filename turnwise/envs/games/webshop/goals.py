"""Goals: what the shopper is asked to buy. Prices, goals and their order follow WebShop, from one
seed."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from turnwise.envs.games.webshop.catalog import Product, ProductError

GoalKind = Literal["synthetic", "human"]
SHUFFLE_SEED = 233
"""WebShop's own. It sets it only after prices were drawn, so that they differ from run to run; here
it comes first."""
PRICE_LIMITS = tuple(10.0 * step for step in range(1, 100))
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A goal: the product it was made from, and the properties that count."""

    asin: str
    title: str
    query: str
    product_category: str
    instruction: str
    """The instruction to the shopper."""
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Wanted values; which option they belong to is not asked, as in WebShop."""
    price_limit: float
    weight: float
    """How often it is drawn where goals are weighted: rare attributes count more."""

    @property
    def key(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """Equal for goals that ask for the same."""
        return (self.asin, self.options, self.attributes)


def draw_prices(products: Sequence[Product], rng: random.Random) -> dict[str, float]:
    """The price of each product, or one drawn from its range."""
    return {
        product.asin: product.pricing[0]
        if len(product.pricing) == 1
        else rng.uniform(*product.pricing)
        for product in products
    }


def make_goals(
    products: Sequence[Product], prices: Mapping[str, float], *, kind: GoalKind, rng: random.Random
) -> list[Goal]:
    """Synthetic: a goal per instruction and combination of the product's options. Human: as people
    wrote them."""
    drafts: list[Goal] = []
    for product in products:
        if kind == "human":
            drafts += _human(product, prices[product.asin], rng)
        elif product.instruction is not None:
            drafts += _synthetic(product, prices[product.asin], rng)
    if not drafts:
        raise ProductError(
            f"no product has what a {kind} goal is made of; synthetic ones need 'instruction' and "
            f"'instruction_attributes' (WebShop's items_ins file), human ones need 'instructions'"
        )
    if kind == "human":
        return drafts
    counts = Counter(attribute for goal in drafts for attribute in goal.attributes)
    return [
        replace(
            goal,
            weight=sum(1 / counts[attribute] for attribute in goal.attributes)
            / len(goal.attributes),
        )
        for goal in drafts
    ]


def split_goals(goals: Sequence[Goal]) -> dict[str, list[Goal]]:
    """The goals in WebShop's order, cut as RAGEN does: 500 for test, 1000 for val, the rest for
    train.

    A small shop gives a tenth to test and a fifth to val. A goal that asks for the same as one of
    an earlier side is left out, so no side shares a goal with another.
    """
    shuffled = list(goals)
    random.Random(SHUFFLE_SEED).shuffle(shuffled)
    num_test, num_val = min(500, len(goals) // 10), min(1000, len(goals) // 5)
    cuts = {
        "test": (0, num_test),
        "val": (num_test, num_test + num_val),
        "train": (num_test + num_val, len(goals)),
    }
    seen: set[tuple[object, ...]] = set()
    sides: dict[str, list[Goal]] = {}
    for name, (start, end) in cuts.items():
        sides[name] = [goal for goal in shuffled[start:end] if goal.key not in seen]
        seen |= {goal.key for goal in sides[name]}
    return sides


def _synthetic(product: Product, price: float, rng: random.Random) -> list[Goal]:
    if not product.instruction_attributes:
        raise ProductError(
            f"product {product.asin} has an instruction but no instruction_attributes"
        )
    limit, price_text = _price_limit(price, rng)
    names = sorted(product.options)
    goals: list[Goal] = []
    for combination in itertools.product(*(product.options[name] for name in names)):
        wanted = ", and ".join(
            f"{name}: {value}" for name, value in zip(names, combination, strict=True)
        )
        option_text = f" with {wanted}" if wanted else ""
        text = f"{product.instruction}{option_text}{price_text}"
        goals.append(_goal(product, text, product.instruction_attributes, combination, limit))
    return goals


def _human(product: Product, price: float, rng: random.Random) -> list[Goal]:
    goals: list[Goal] = []
    for wish in product.human_goals:
        if wish.attributes:
            limit, price_text = _price_limit(price, rng)
            goals.append(
                _goal(
                    product, wish.text.strip(".") + price_text, wish.attributes, wish.options, limit
                )
            )
    return goals


def _price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """The larger of two of the next four multiples of ten above the price."""
    limits = [limit for limit in PRICE_LIMITS if limit > price][:4]
    if len(limits) < 2:
        return NO_LIMIT, ""
    limit = max(rng.sample(limits, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _goal(
    product: Product, text: str, attributes: tuple[str, ...], options: tuple[str, ...], limit: float
) -> Goal:
    return Goal(
        asin=product.asin,
        title=product.title,
        query=product.query,
        product_category=product.product_category,
        instruction=text,
        attributes=attributes,
        options=options,
        price_limit=limit,
        weight=1.0,
    )
