"""The reward of a purchase: WebShop's formula.

    score = r_type * (attributes hit + options hit + [price <= limit]) / (attributes + options + 1)

One thing is repaired. WebShop compares a synthetic goal's options as (name, value) pairs and
reduces colours to their plain names on one side only, so that a perfect purchase can score below 1.
Here values are compared with values, and colours are reduced on both sides.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnwise.envs.games.webshop.catalog import Product
from turnwise.envs.games.webshop.goals import Goal

MATCH = 85
"""Two phrases match when their token-set ratio, rounded, is above this."""
_COLOUR_TEXT = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow"""
COLOURS = tuple(_COLOUR_TEXT.split())
"""The words that WebShop takes for colours, in its order: the first that occurs in an option names
it."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOT_NOUN_TEXT = """
and the for with from of in on to by or at an your our you is are be new free set pack inch inches
oz fl ct"""
_NOT_NOUNS = frozenset(_NOT_NOUN_TEXT.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A purchase, judged.

    Example:
        >>> Score(r_type=0.5, attribute_hits=1, option_hits=0, price_hit=True, num_attributes=2,
        ...       num_options=1).total
        0.25
    """

    r_type: float
    """1 for the same kind of product, down to 0 for an unrelated one."""
    attribute_hits: int
    option_hits: int
    price_hit: bool
    num_attributes: int
    num_options: int

    @property
    def total(self) -> float:
        hits = self.attribute_hits + self.option_hits + self.price_hit
        return self.r_type * hits / (self.num_attributes + self.num_options + 1)


def judge(
    product: Product,
    goal: Goal,
    *,
    price: float,
    options: Mapping[str, str],
    nouns: Mapping[str, Sequence[str]] | None = None,
) -> Score:
    """The score of buying a product with these options. `nouns`: product id -> nouns of its title
    (see title_nouns)."""
    return Score(
        r_type=type_reward(product, goal, nouns=nouns),
        attribute_hits=_attribute_hits(product, goal),
        option_hits=_option_hits(tuple(options.values()), goal.options),
        price_hit=price <= goal.price_limit,
        num_attributes=len(goal.attributes),
        num_options=len(goal.options),
    )


def type_reward(
    product: Product, goal: Goal, *, nouns: Mapping[str, Sequence[str]] | None = None
) -> float:
    """Whether it is the kind of thing that was asked for, by query, categories and the nouns of the
    titles."""
    wanted = title_nouns(goal.asin, goal.title, nouns)
    bought = title_nouns(product.asin, product.title, nouns)
    title_score = len(set(wanted) & set(bought)) / len(wanted) if wanted else 0.2
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    same_query = product.query == goal.query
    categories = _categories(product.product_category) & _categories(goal.product_category)
    return 1.0 if same_query or len(categories) >= 2 or title_score > 0.2 else 0.5


def title_nouns(asin: str, title: str, nouns: Mapping[str, Sequence[str]] | None) -> Sequence[str]:
    """The nouns of a title as the file says; without a file, or where it has none, the words that
    are likely ones."""
    if nouns is not None and asin in nouns:
        return nouns[asin]
    return [word for word in _WORD.findall(title.lower()) if word not in _NOT_NOUNS]


def plain_colour(option: str) -> str:
    """The first known colour word that occurs in an option, or the option itself.

    Example:
        >>> plain_colour("r.brown2070"), plain_colour("violet lavender"), plain_colour("12 ounce")
        ('brown', 'lavender', '12 ounce')
    """
    return next((colour for colour in COLOURS if colour in option), option)


def matches(first: str, second: str) -> bool:
    """Whether two phrases say the same, by the ratio of their sets of words."""
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as error:
        raise ImportError(
            f"WebShop's reward needs rapidfuzz ({error}); run: pip install 'turnwise[webshop]'"
        ) from error
    return round(fuzz.token_set_ratio(first, second, processor=utils.default_process)) > MATCH


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("\u203a")}


def _attribute_hits(product: Product, goal: Goal) -> int:
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(matches(attribute, own) for own in product.attributes)
        or any(attribute in text for text in texts)
        for attribute in goal.attributes
    )


def _option_hits(bought: Sequence[str], wanted: Sequence[str]) -> int:
    plain = [plain_colour(value) for value in bought]
    return sum(any(matches(plain_colour(value), own) for own in plain) for value in wanted)
