"""`turnwise envs`: the environments that a config can name."""

import typer


def register(app: typer.Typer) -> None:
    app.command("envs")(envs)


def envs() -> None:
    """List the environments, and what they still need."""
    from turnwise.envs.registry import list_envs

    rows = list_envs()
    width = max(len(spec.name) for spec in rows)
    for spec in rows:
        also = f" Also called {', '.join(spec.aliases)}." if spec.aliases else ""
        print(f"{spec.name:<{width}}  {spec.summary}{also}")
        if not spec.available:
            wanted = f"turnwise[{spec.extra}]" if spec.extra else " ".join(spec.missing)
            print(f"{'':<{width}}  not installed: pip install '{wanted}'")
    print("\nAnother environment is named as module:Class or path/to/file.py:Class.")
