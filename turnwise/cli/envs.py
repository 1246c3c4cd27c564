"""`turnwise envs`: the environments that a config can name."""

import typer


def register(app: typer.Typer) -> None:
    app.command("envs")(envs)


def envs() -> None:
    """List the environments: name, whether ready, required packages, description."""
    from turnwise.envs.registry import EnvSpec, list_envs

    def needs(spec: EnvSpec) -> str:
        return spec.install or (f"(turnwise[{spec.also}])" if spec.also else "-")

    rows = list_envs()
    lines = [("name", "ready", "needs", "description")]
    for spec in rows:
        also = f" Also called {', '.join(spec.aliases)}." if spec.aliases else ""
        lines.append(
            (spec.name, "yes" if spec.available else "no", needs(spec), spec.summary + also)
        )
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for line in lines:
        print(
            "  ".join(
                [*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]]
            )
        )
    print(
        "\nInstall the packages with: pip install 'NEEDS'. In brackets: optional; the environment "
        "runs without them, with fewer features."
    )
    print(
        "Another environment is named as module:Class or path/to/file.py:Class, or by the url of "
        "turnwise serve-env."
    )
