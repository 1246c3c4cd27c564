"""A buyer who knows its goal, for demonstrations.

It shops as a person would: it searches with the words of the instruction, looks through the first
pages, opens the first product that fits, chooses the options and buys. That a product fits it knows
from the goal, where a person would read. It clicks only what its page shows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.envs.games.webshop.catalog import Product
from turnwise.envs.games.webshop.goals import Goal
from turnwise.envs.games.webshop.pages import BACK, BUY, NEXT, PREVIOUS, SUB_PAGES
from turnwise.envs.games.webshop.reward import judge, matches, plain_colour
from turnwise.envs.games.webshop.shop import Shop

PAGES = 3
"""Pages of results that are looked at before other words are tried."""
MAX_WORDS = 20
_PRICE = re.compile(r",? and price lower than [\d.]+ dollars\s*$")
_OPTION = re.compile(r"(?: with |, and )(?:(?! with )[\w &/-])+: ")
"""How a synthetic instruction begins an option, such as ", and fit type: "."""
_WORD = re.compile(r"[^\s,;:()\[\]]+")
_EMPTY_TEXT = """
a an and am are at be by can could find for from get give has have i i'd i'm i'll in is it like
look looking me my need of on one or please searching some something that the to want which with
would you"""
_EMPTY = frozenset(_EMPTY_TEXT.split())
_BUTTONS = frozenset(name.lower() for name in (*SUB_PAGES, BACK, NEXT, PREVIOUS, BUY))


def search_words(instruction: str) -> tuple[str, ...]:
    """The words of an instruction that a search is made with, each once; the price is left out, and
    so are the names of options.

    Example:
        >>> search_words("Find me lead free mugs with color: sea blue, and size: 12 oz, and price "
        ...              "lower than 30.00 dollars")
        ('lead', 'free', 'mugs', 'sea', 'blue', '12', 'oz')
    """
    text = _OPTION.sub(" , ", _PRICE.sub("", instruction).lower())
    words = (word.strip(".!?'\"") or word for word in _WORD.findall(text))
    return tuple(dict.fromkeys(word for word in words if word not in _EMPTY))


def queries(goal: Goal) -> tuple[str, ...]:
    """The search queries, in order: all words, those without the options, and the
    options with the first words."""
    words = search_words(goal.instruction)
    chosen = {word for option in goal.options for word in search_words(option)}
    plain = [word for word in words if word not in chosen]
    asked = (words, plain, [*plain[:4], *(word for word in words if word in chosen)])
    return tuple(dict.fromkeys(" ".join(some[:MAX_WORDS]) for some in asked if some)) or (
        " ".join(goal.instruction.split()[:MAX_WORDS]),
    )


def wanted_options(product: Product, goal: Goal) -> dict[str, str]:
    """Option name -> the value that the goal asks for, as far as the product has it, in the order
    of the page."""
    chosen: dict[str, str] = {}
    for wanted in goal.options:
        values = [value for values in product.options.values() for value in values]
        colour = plain_colour(wanted)
        # An equal value first; sorting keeps the order of the page otherwise.
        for value in sorted(values, key=lambda value: value != wanted):
            # A click on a value goes to the first option that has it.
            name = next(name for name, own in product.options.items() if value in own)
            if name in chosen or value in _BUTTONS:
                continue
            if value == wanted or matches(colour, plain_colour(value)):
                chosen[name] = value
                break
    return {name: chosen[name] for name in product.options if name in chosen}


@dataclass(slots=True)
class Buyer:
    """A buyer in one episode."""

    shop: Shop
    goal: Goal
    given_up: set[str] = field(default_factory=set[str])
    """Queries whose first pages were looked at."""
    _fits: dict[str, bool] = field(default_factory=dict[str, bool])
    """Product id -> whether buying it with the best options scores 1."""

    def saw_results(self, query: str, *, number: int, is_last: bool) -> None:
        """Takes in that a page of results was shown."""
        if number >= PAGES or is_last:
            self.given_up.add(query)

    def on_search(self) -> str:
        """The next words that were not looked through; all of them: the first again."""
        asked = queries(self.goal)
        left = [query for query in asked if query not in self.given_up]
        return f"search[{(left or asked)[0]}]"

    def on_results(self, query: str, clickables: Sequence[str]) -> str:
        """Opens the first product that fits, or looks further: on the next page, with other words,
        and on all pages once there are no other words."""
        ids = [name.upper() for name in clickables if name not in _BUTTONS]
        fitting = next((asin for asin in ids if self.fits(asin)), None)
        if fitting is not None:
            return click(fitting)
        asked = queries(self.goal)
        left = [other for other in asked if other not in self.given_up]
        if NEXT.lower() in clickables and (query in left or not left):
            return click(NEXT)
        return f"search[{left[0]}]" if left else click(BACK)

    def on_item(self, asin: str, *, chosen: Mapping[str, str]) -> str:
        """Chooses what is not yet chosen, then buys; leaves a product that does not fit."""
        if not self.fits(asin):
            return click(PREVIOUS)
        for name, value in wanted_options(self.shop.products[asin], self.goal).items():
            if chosen.get(name) != value:
                return click(value)
        return click(BUY)

    def fits(self, asin: str) -> bool:
        if asin not in self._fits:
            product = self.shop.products[asin]
            score = judge(
                product,
                self.goal,
                price=self.shop.prices[asin],
                options=wanted_options(product, self.goal),
                nouns=self.shop.nouns,
            )
            self._fits[asin] = score.total >= 1.0
        return self._fits[asin]


def click(name: str) -> str:
    """The action, written as the list of possible actions writes it.

    Example:
        >>> click("Buy Now")
        'click[buy now]'
    """
    return f"click[{name.lower()}]"
