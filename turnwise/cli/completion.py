"""`turnwise completion SHELL`: a script that completes commands, options, recipes and keys."""

from typing import Annotated, Any, cast

import typer

from turnwise.cli.args import fail

SHELLS = ("bash", "zsh", "fish")


def register(app: typer.Typer) -> None:
    app.command("completion", epilog='Example: eval "$(turnwise completion bash)" in ~/.bashrc')(
        completion
    )


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", metavar="SHELL")],
) -> None:
    """Print a completion script: eval it in your shell's start file (fish: pipe it to source)."""
    if shell not in SHELLS:
        fail(f"SHELL is one of {', '.join(SHELLS)}, got {shell!r}")
    words = words_by_command()
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words), end="")


def words_by_command() -> dict[str, list[str]]:
    """Command -> completions: its options, and recipes, environments and config keys if it takes
    them."""
    import typer.main

    from turnwise.cli.main import COMMANDS, build_app
    from turnwise.config import list_recipes
    from turnwise.config.tree import known_fields, section_of
    from turnwise.envs.registry import list_envs

    keys = [f"{key}=" for key, field in known_fields().items() if section_of(field) is None]
    recipes = list(list_recipes())
    envs = [spec.name for spec in list_envs() if spec.selects is None]
    more = {
        "train": [*recipes, *keys],
        "eval": [*recipes, *keys],
        "rollout": [*recipes, *keys],
        "sweep": [*recipes, *keys],
        "config": ["show", "keys", *recipes, *keys],
        "play": [*envs, *keys],
        "check-env": envs,
        "serve-env": envs,
        "init": ["game", "tools", "chat", "prompts", "project"],
        "completion": list(SHELLS),
    }
    group = cast(Any, typer.main.get_command(build_app(tuple(COMMANDS))))
    found: dict[str, list[str]] = {}
    for name, command in cast("dict[str, Any]", group.commands).items():
        options: list[str] = [
            option
            for parameter in command.params
            for option in parameter.opts
            if option.startswith("--")
        ]
        found[name] = [*more.get(name, []), *options, "--help"]
    return found


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(found)}" ;;' for name, found in words.items())
    return f"""_turnwise() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{" ".join(words)}" ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{" ".join(words)}"
  COMPREPLY=( $(compgen -W "$words" -- "$current") )
  case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _turnwise turnwise
"""


def _zsh(words: dict[str, list[str]]) -> str:
    cases = "\n".join(
        f"    {name}) found=({' '.join(map(_quoted, found))}) ;;" for name, found in words.items()
    )
    return f"""#compdef turnwise
_turnwise() {{
  local -a found
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(words)}
    return
  fi
  case "$words[2]" in
{cases}
  esac
  compadd -S '' -- "${{(@M)found:#*=}}"
  compadd -- "${{(@)found:#*=}}"
  _files
}}
compdef _turnwise turnwise
"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = [f"complete -c turnwise -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for name, found in words.items():
        lines.append(
            f"complete -c turnwise -n '__fish_seen_subcommand_from {name}' -a '{' '.join(found)}'"
        )
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    return f"'{word}'"
