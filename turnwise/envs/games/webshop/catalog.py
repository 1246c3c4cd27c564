"""Products: what a shop sells, read from WebShop's files or written inline, and checked field by
field."""

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

NO_PRICE = 100.0
"""Price of a product without one, as in WebShop."""


class ProductError(ValueError):
    """A product file that a shop cannot be built from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HumanGoal:
    """A wish that a person wrote down for a product."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One product page.

    Example:
        >>> read_product({"asin": "A1", "name": "Mug", "category": "home", "query": "Mugs",
        ...     "product_category": "Home",
        ...               "full_description": "", "small_description": [],
        ...               "pricing": "$4 to $6"}).price_tag
        '$4.0 to $6.0'
    """

    asin: str
    title: str
    category: str
    query: str
    """The search that led to it when the catalogue was collected; equal queries mean the same kind
    of thing."""
    product_category: str
    """Categories from general to special, separated by an angle sign."""
    description: str
    bullets: tuple[str, ...]
    pricing: tuple[float, ...]
    """One price, or the ends of a range."""
    rating: str
    reviews: tuple[tuple[str, str, str], ...]
    """(title, score, text)"""
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    instruction: str | None
    """Text of a synthetic goal for this product, without options and price."""
    instruction_attributes: tuple[str, ...]
    human_goals: tuple[HumanGoal, ...]
    search_text: str
    """The text for the search index."""

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.pricing)


REQUIRED = (
    "asin",
    "name",
    "category",
    "query",
    "product_category",
    "full_description",
    "small_description",
)


def read_products(path: Path, *, attributes: Path | None = None) -> tuple[Product, ...]:
    """The products of a file (JSON list, or one JSON object per line; gzip too), in order, without
    repeated ids.

    `attributes` is WebShop's second file: product id -> attributes, instruction,
    instruction_attributes.

    Raises:
        ProductError: the file or a product in it is not as it must be; the message names the
            product and the field.
    """
    rows = _read_rows(path)
    extra: dict[str, Any] = {}
    if attributes is not None:
        loaded = _read_json(attributes)
        if not isinstance(loaded, dict):
            raise ProductError(
                f"{attributes} holds one object, product id -> attributes, got "
                f"{type(loaded).__name__}"
            )
        extra = cast(dict[str, Any], loaded)
    products: dict[str, Product] = {}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ProductError(
                f"{path}, product {number}: a product is an object, got {type(row).__name__}"
            )
        fields = cast(dict[str, Any], row)
        asin = fields.get("asin")
        try:
            product = read_product(
                {**fields, **_extra_fields(extra.get(asin) if isinstance(asin, str) else None)}
            )
        except ProductError as error:
            raise ProductError(f"{path}, product {number} (asin {asin!r}): {error}") from error
        products.setdefault(product.asin, product)
    if not products:
        raise ProductError(f"a shop sells at least one product, got none from {path}")
    return tuple(products.values())


def read_product(row: Mapping[str, Any]) -> Product:
    """The product of one row, in WebShop's raw form or with prices and options already taken
    apart."""
    missing = [field for field in REQUIRED if field not in row]
    if missing:
        raise ProductError(
            f"a product has the fields {', '.join(REQUIRED)}; missing: {', '.join(missing)}"
        )
    for field in REQUIRED[:6]:
        if not isinstance(row[field], str):
            raise ProductError(f"{field!r} is text, got {type(row[field]).__name__}")
    if not row["asin"].strip():
        raise ProductError("a product has an id ('asin') that is not empty")
    bullets = row["small_description"]
    bullet_texts = (
        _strings(bullets, "small_description") if isinstance(bullets, list) else (str(bullets),)
    )
    options = _options(row)
    title = cast(str, row["name"])
    search_text = row.get("search_text")
    if search_text is None:
        choices = ", and ".join(f"{name}: {', '.join(values)}" for name, values in options.items())
        search_text = " ".join([title, row["full_description"], *bullet_texts[:1], choices]).lower()
    return Product(
        asin=row["asin"].strip().upper(),
        title=title,
        category=row["category"],
        query=row["query"].lower().strip(),
        product_category=row["product_category"],
        description=row["full_description"],
        bullets=bullet_texts,
        pricing=_pricing(row.get("pricing")),
        rating=str(row.get("average_rating") or "N.A."),
        reviews=_reviews(row.get("reviews") or ()),
        options=options,
        attributes=_strings(row.get("Attributes") or (), "Attributes"),
        instruction=row.get("instruction"),
        instruction_attributes=_strings(
            row.get("instruction_attributes") or (), "instruction_attributes"
        ),
        human_goals=_human_goals(row.get("instructions") or ()),
        search_text=str(search_text),
    )


def _extra_fields(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        return {}
    fields = cast(dict[str, Any], entry)
    names = {
        "attributes": "Attributes",
        "instruction": "instruction",
        "instruction_attributes": "instruction_attributes",
    }
    return {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}


def _read_rows(path: Path) -> list[Any]:
    if not path.exists():
        raise FileNotFoundError(
            f"no product file at {path}; give WebShop's items_shuffle file or JSON lines of "
            "products"
        )
    text = _read_text(path)
    if text.lstrip().startswith("["):
        return cast(list[Any], _parse(text, path))
    rows: list[Any] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            rows.append(_parse(line, path, line=number))
    return rows


def _read_json(path: Path) -> Any:
    return _parse(_read_text(path), path)


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ProductError(f"{path} is UTF-8 text, or gzip of it: {error}") from error


def _parse(text: str, path: Path, *, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f", line {line}" if line else ""
        raise ProductError(f"{path}{where} is not JSON: {error}") from error


def _strings(values: Any, field: str) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, str) for value in cast(list[Any], values)
    ):
        raise ProductError(f"{field!r} is a list of texts, got {values!r:.80}")
    return tuple(cast(list[str], values))


def _pricing(value: Any) -> tuple[float, ...]:
    """One price or two. Text such as "$9.99 to $12" is taken apart; nothing means 100 dollars, as
    in WebShop."""
    if not value:
        return (NO_PRICE,)
    try:
        if isinstance(value, str):
            prices = [float(re.sub(r"[^\d.]", "", part)) for part in value.split("$")[1:]]
        elif isinstance(value, list):
            prices = [float(price) for price in cast(list[Any], value)]
        else:
            prices = [float(value)]
    except (TypeError, ValueError) as error:
        raise ProductError(
            f"'pricing' is a price, a list of one or two, or text with $ signs, got {value!r:.80}"
        ) from error
    if not prices or not all(0.0 <= price < 1e9 for price in prices):
        raise ProductError(f"a price lies between 0 and a billion dollars, got {value!r:.80}")
    return tuple(prices[:2])


def _options(row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Option name -> values, lower case, from "options" or from WebShop's raw
    "customization_options"."""
    ready = row.get("options")
    if isinstance(ready, dict):
        return {
            str(name).lower(): tuple(_plain(value) for value in _strings(values, "options"))
            for name, values in cast(dict[Any, Any], ready).items()
        }
    raw = cast(Any, row.get("customization_options") or {})
    if not isinstance(raw, dict):
        raise ProductError(f"'customization_options' maps names to values, got {raw!r:.80}")
    options: dict[str, tuple[str, ...]] = {}
    for name, contents in cast(dict[str, Any], raw).items():
        if contents is None:
            continue
        try:
            values = [_plain(content["value"].strip().replace("/", " | ")) for content in contents]
        except (TypeError, KeyError, AttributeError) as error:
            raise ProductError(
                f"each choice of option {name!r} has a 'value', got {contents!r:.80}"
            ) from error
        options[name.lower()] = tuple(values)
    return options


def _plain(value: str) -> str:
    """Lower case and single spaces (no-break ones too), so that a click can be written as it is
    read."""
    return " ".join(value.lower().split())


def _reviews(rows: Any) -> tuple[tuple[str, str, str], ...]:
    reviews: list[tuple[str, str, str]] = []
    for row in rows:
        if not isinstance(row, dict):
            raise ProductError(f"a review is an object with title, score and body, got {row!r:.80}")
        fields = cast(dict[str, Any], row)
        score = fields.get("score", fields.get("stars", ""))
        reviews.append(
            (
                str(fields.get("title", "")),
                str(score),
                str(fields.get("body", fields.get("review", ""))),
            )
        )
    return tuple(reviews)


def _human_goals(rows: Any) -> tuple[HumanGoal, ...]:
    goals: list[HumanGoal] = []
    for row in rows:
        if not isinstance(row, dict) or "instruction" not in row:
            raise ProductError(
                f"each of 'instructions' is an object with an 'instruction', got {row!r:.80}"
            )
        fields = cast(dict[str, Any], row)
        goals.append(
            HumanGoal(
                text=str(fields["instruction"]),
                attributes=_strings(
                    fields.get("instruction_attributes") or (), "instruction_attributes"
                ),
                options=_strings(fields.get("instruction_options") or (), "instruction_options"),
            )
        )
    return tuple(goals)
