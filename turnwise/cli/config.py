"""`turnwise config`: lists settings, and shows resolved configs."""

import json
from typing import Annotated

import typer
from pydantic.fields import FieldInfo

from turnwise.cli.args import TAKES_OVERRIDES, config_from, fail
from turnwise.config import list_recipes, show_config
from turnwise.config.tree import default_at, iter_fields, known_fields, nearest, section_of


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        invoke_without_command=True, help="List recipes and keys, or show a resolved config."
    )
    group.callback()(overview)
    group.command(
        "show",
        context_settings=TAKES_OVERRIDES,
        options_metavar="[RECIPE|CONFIG.yaml] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise config show frozen_lake train.steps=50",
    )(show)
    group.command("keys")(keys)
    app.add_typer(group, name="config")


def overview(ctx: typer.Context) -> None:
    """List the recipes and the sections of a config."""
    if ctx.invoked_subcommand is not None:
        return
    recipes = list_recipes()
    width = max(len(name) for name in recipes)
    print("Recipes:")
    for name, summary in recipes.items():
        print(f"  {name:<{width}}  {summary}")
    print("\nTop-level keys:")
    for path, field in known_fields().items():
        if "." not in path:
            print(f"  {describe(path, field)}")
    print("\nturnwise config keys SECTION    every key of a section, with its default")
    print("turnwise config show SOURCE     the config of `turnwise train SOURCE`, with overrides")


def show(ctx: typer.Context) -> None:
    """Print the config that `turnwise train` runs with the same arguments: a recipe or file, and
    overrides such as --train.max_turn 3."""
    print(show_config(config_from(ctx.args)), end="")


def keys(
    prefix: Annotated[str, typer.Argument(help="A section, such as train or env.format.")] = "",
) -> None:
    """Print every key with its default and meaning."""
    rows = [
        (path, field)
        for path, field in iter_fields()
        if not prefix or f"{path}.".startswith(f"{prefix}.")
    ]
    if not rows:
        guess = nearest(prefix, known_fields())
        fail(f"there is no key {prefix}" + (f"; did you mean {guess}?" if guess else ""))
    for path, field in rows:
        if section_of(field) is None:
            print(describe(path, field))


def describe(path: str, field: FieldInfo) -> str:
    """One line about a key.

    Example:
        >>> describe("train.max_turn", known_fields()["train.max_turn"])
        'train.max_turn = 5  Turns per episode, unless the environment has its own limit.'
    """
    inner = section_of(field)
    if inner is not None:
        return f"{path}: {', '.join(inner.model_fields)}"
    text = " ".join((field.description or "").split())
    return f"{path} = {default_text(path)}  {text}".rstrip()


def default_text(path: str) -> str:
    """A key's default, as YAML."""
    value = default_at(path)
    return value if isinstance(value, str) else json.dumps(value)
