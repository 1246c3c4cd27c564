"""How many examples a property is tried on."""

from hypothesis import settings


def examples(count: int) -> settings:
    """So many examples in `make test`, and as many more in `make test-search` as its profile has
    more of them."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
