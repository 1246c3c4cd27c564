"""The direction in which data flows is the direction in which imports point. Parsed, not run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "turnwise"

# What each room may import, besides itself. A room stands below everything that it may import.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "seeding": {"types"},
    "json_lines": set(),
    "callable_module": set(),
    "user_code": {"seeding"},
    "procs": set(),
    "config": {"types", "seeding", "json_lines", "user_code"},
    "data": {"types", "config"},
    "chat": {"types"},
    "log": {"types", "json_lines", "config", "user_code", "data"},
    "algos": {"types", "config", "data", "user_code"},
    "envs": {"types", "seeding", "json_lines", "config", "procs", "user_code"},
    "models": {"types", "config", "data", "chat", "algos", "procs"},
    "generate": {"types", "seeding", "config", "models", "procs"},
    "isolation": {"types", "config", "envs", "procs", "user_code"},
}
ALLOWED["serve"] = ALLOWED["isolation"] | {"isolation"}
ALLOWED["endpoint"] = ALLOWED["serve"] | {"serve", "chat", "generate", "seeding"}
ALLOWED["rollout"] = {
    "types",
    "seeding",
    "config",
    "data",
    "procs",
    "envs",
    "chat",
    "generate",
    "isolation",
    "user_code",
}
ALLOWED["evaluate"] = ALLOWED["rollout"] | {"rollout", "log", "callable_module"}
ALLOWED["inspect"] = ALLOWED["evaluate"] | {"json_lines", "evaluate", "models", "serve"}
ALLOWED["train"] = ALLOWED["evaluate"] | {"json_lines", "evaluate", "algos", "models", "inspect"}
ALLOWED["testing"] = (ALLOWED["train"] | {"train"}) - {"inspect"}
ALLOWED["integrations"] = ALLOWED["testing"] | {"testing", "inspect"}
ALLOWED["cli"] = ALLOWED["train"] | {"train", "serve", "endpoint"}
ALLOWED["trainers"] = {"cli", "config", "envs", "train", "integrations"}
ALLOWED["api"] = ALLOWED["train"] | {"train"}

# Imports by string, where a name is looked up when it is wanted: file -> rooms.
BY_NAME: dict[str, set[str]] = {
    "envs/registry.py": {"serve", "endpoint", "integrations"},  # the table of environments
    "envs/__init__.py": {"evaluate"},  # check_env
    "cli/train.py": {"integrations"},  # --backend
    "train/__init__.py": {"api"},  # turnwise.train(...)
    "evaluate/__init__.py": {"api"},  # turnwise.evaluate(...)
}

# These start with `turnwise --help` and `import turnwise`, so nothing heavy may be imported at
# their top.
LIGHT = (
    "types.py",
    "seeding.py",
    "json_lines.py",
    "user_code.py",
    "callable_module.py",
    "__init__.py",
    "__main__.py",
    "config",
    "cli",
    "envs/registry.py",
    "envs/base.py",
)
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gymnasium",
    "numpy",
    "trl",
    "verl",
    "ray",
    "vllm",
    "peft",
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, path: Path) -> set[str]:
    """Full names of what is imported. `from turnwise import x` counts as turnwise.x."""
    found: set[str] = set()
    package = ["turnwise", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def named(tree: ast.AST) -> set[str]:
    """Modules of ours that strings name: "turnwise.train.run",
    "turnwise.envs.games.bandit:Bandit"."""
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {
        text.partition(":")[0]
        for text in texts
        if re.fullmatch(r"turnwise(\.[a-z0-9_]+)+\.?(:\w+)?", text)
    }


class _TopLevel(ast.NodeTransformer):
    """Leaves only what runs when the module is imported."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return (
            None if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'") else node
        )


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    assert part in ALLOWED, f"turnwise/{part} is new: give it a place in the order"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        name for block in ast.walk(tree) if _for_types(block) for name in imports(block, path=path)
    }
    allowed_by_name = BY_NAME.get(str(path.relative_to(ROOT)), set())
    for name in imports(tree, path=path) | named(tree):
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if root != "turnwise" or target not in ALLOWED or target == part:
            continue
        by_name = target in allowed_by_name and name in typing | named(tree)
        file = path.relative_to(ROOT)
        assert by_name or target in ALLOWED[part], f"{file} must not import {name}"


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def light_modules() -> list[Path]:
    chosen = [ROOT / name for name in LIGHT]
    return [path for path in modules() if any(path == one or one in path.parents for one in chosen)]


@pytest.mark.parametrize("path", light_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_light_modules_import_nothing_heavy_at_their_top(path: Path) -> None:
    top = _TopLevel().visit(ast.parse(path.read_text(encoding="utf-8")))
    heavy = {name for name in imports(top, path=path) if name.partition(".")[0] in HEAVY}
    assert not heavy, (
        f"{path.relative_to(ROOT)} loads {', '.join(sorted(heavy))} when it is imported; import it "
        "inside"
    )


def test_the_order_has_no_circles() -> None:
    def reach(part: str, seen: tuple[str, ...]) -> None:
        assert part not in seen, " -> ".join((*seen, part))
        for other in ALLOWED[part]:
            reach(other, (*seen, part))

    for part in ALLOWED:
        reach(part, ())


def test_the_parser_sees_relative_and_nested_imports() -> None:
    source = (
        "from ..train import step\ndef f():\n    import turnwise.cli.main\nfrom turnwise import "
        "rollout"
    )
    found = imports(ast.parse(source), path=ROOT / "envs" / "x.py")
    assert found == {"turnwise.train.step", "turnwise.cli.main", "turnwise.rollout"}
