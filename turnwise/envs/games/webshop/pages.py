"""The pages of the shop as lists of elements, rendered in one of three formats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.envs.games.webshop.catalog import Product

Kind = Literal["text", "button", "option", "product"]
ObservationMode = Literal["text", "text_rich", "url"]
MODES: tuple[ObservationMode, ...] = ("text", "text_rich", "url")

PAGE_SIZE = 10
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Something on a page: plain text, or something to click."""

    text: str
    kind: Kind = "text"
    clicked: bool = False
    """An option that is chosen, or a product that was looked at."""


Page = tuple[Piece, ...]


def _texts(texts: Iterable[str]) -> list[Piece]:
    return [Piece(text=text) for text in texts if text.strip()]


def _button(text: str) -> Piece:
    return Piece(text=text, kind="button")


def _header(instruction: str) -> list[Piece]:
    return _texts(["Instruction:", instruction])


def search_page(instruction: str) -> Page:
    return (Piece(text="WebShop"), *_header(instruction), _button("Search"))


def results_page(
    instruction: str,
    products: Sequence[Product],
    *,
    page: int,
    total: int,
    visited: frozenset[str] | set[str],
) -> Page:
    """One page of results; `total` counts all of them."""
    pieces = [
        *_header(instruction),
        _button(BACK),
        *_texts([f"Page {page} (Total results: {total})"]),
    ]
    if page > 1:
        pieces.append(_button(PREVIOUS))
    if page * PAGE_SIZE < total:
        pieces.append(_button(NEXT))
    for product in products:
        pieces.append(Piece(text=product.asin, kind="product", clicked=product.asin in visited))
        pieces += _texts([product.title, product.price_tag])
    return tuple(pieces)


def item_page(
    instruction: str, product: Product, *, options: dict[str, str], show_attributes: bool
) -> Page:
    pieces = [*_header(instruction), _button(BACK), _button(PREVIOUS)]
    for name, values in product.options.items():
        pieces += _texts([name])
        pieces += [
            Piece(text=value, kind="option", clicked=options.get(name) == value) for value in values
        ]
    pieces += _texts([product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"])
    pieces += [_button(name) for name in SUB_PAGES if show_attributes or name != "Attributes"]
    return (*pieces, _button(BUY))


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """The description, the features, the reviews or the attributes of a product."""
    if name == "Description":
        content = [product.description or "No description"]
    elif name == "Features":
        content = list(product.bullets) or ["No features"]
    elif name == "Reviews":
        content = [text for review in product.reviews for text in review] or ["No reviews found"]
    else:
        content = [*product.attributes, product.category, product.query, product.product_category]
    return (*_header(instruction), _button(BACK), _button(PREVIOUS), *_texts(content))


def done_page(score: float) -> Page:
    return tuple(
        _texts(["Thank you for shopping with us!", f"Your score (min 0.0, max 1.0): {score:.4g}"])
    )


def clickables(page: Page) -> tuple[str, ...]:
    """Clickable elements, lower case, each once. The search button needs words, so it is not among
    them."""
    names = [piece.text.lower() for piece in page if piece.kind != "text"]
    return tuple(dict.fromkeys(name for name in names if name != "search"))


def as_text(page: Page) -> str:
    """All that can be seen, in order, separated by [SEP].

    Example:
        >>> as_text(search_page("find a mug"))
        'WebShop [SEP] Instruction: [SEP] find a mug [SEP] Search'
    """
    return " [SEP] ".join(piece.text.strip() for piece in page)


def as_rich_text(page: Page) -> str:
    """A line each, with buttons marked, and those that are chosen or visited marked otherwise.

    Example:
        >>> print(as_rich_text((Piece(text="size"), Piece(text="xl", kind="option", clicked=True))))
        You have clicked xl.
        size
          [clicked button] xl [clicked button_]
    """
    lines: list[str] = []
    for piece in page:
        if piece.kind == "text":
            lines.append(piece.text)
            continue
        mark = "clicked button" if piece.clicked else "button"
        indent = {"option": "  ", "product": "\n"}.get(piece.kind, "")
        lines.append(f"{indent}[{mark}] {piece.text} [{mark}_]")
        if piece.kind == "option" and piece.clicked:
            lines.insert(0, f"You have clicked {piece.text}.")
    return "\n".join(lines)
