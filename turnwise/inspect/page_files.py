"""The files of the page, served one by one or joined into a single file."""

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import PurePosixPath

from turnwise.inspect.folder import InspectError
from turnwise.types import Json

PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(
    r"^export (?=(?:const|class|(?:async )?function) (?:\{([^}]*)\}|(\w+)))", re.MULTILINE
)
_SHEET = re.compile(r'<link rel="stylesheet" href="static/([\w./-]+)">')
_SCRIPT = re.compile(r'<script(?: type="(module)")? src="static/([\w./-]+)"></script>')


def page_file(name: str) -> bytes:
    """A file of the page, such as main.js or vendor/uPlot.min.css.

    Raises:
        InspectError: there is none of this name.
    """
    if name not in _names():
        raise InspectError(f"there is no {name[:80]!r} here")
    return (files("turnwise.inspect") / "page").joinpath(*name.split("/")).read_bytes()


@cache
def _names() -> frozenset[str]:
    root = files("turnwise.inspect") / "page"
    found = {file.name for file in root.iterdir() if file.is_file()}
    found |= {f"vendor/{file.name}" for file in (root / "vendor").iterdir()}
    return frozenset(name for name in found if PurePosixPath(name).suffix in PAGE_TYPES)


def single_page(data: Json, *, title: str) -> str:
    """The whole page with its data, as one file that works without a server and asks for nothing.

    Its content-security policy allows exactly the scripts and styles that are in it.

    Args:
        data: by the url that the page asks for.
    """
    head, tail = _shell()
    head = re.sub(r"<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>", head)
    return f'{head}<script type="application/json" id="data">{_inert(data)}</script>\n{tail}'


@cache
def _shell() -> tuple[str, str]:
    """The page before its data and after it."""
    page = page_file("index.html").decode()
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(kind: str, text: str) -> str:
        if re.search(rf"</{kind}|<!--", text, re.IGNORECASE):
            raise ValueError(f"a {kind} of the page ends its own element: it cannot be inlined")
        digest = hashlib.sha256(text.encode()).digest()
        hashes[kind].append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    def script(found: re.Match[str]) -> str:
        text = bundle(found[2]) if found[1] else page_file(found[2]).decode()
        return inline("script", text)

    page = _SHEET.sub(lambda found: inline("style", page_file(found[1]).decode()), page)
    first = _SCRIPT.search(page)
    assert first is not None
    head, tail = page[: first.start()], _SCRIPT.sub(script, page[first.start() :])
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1), tail


@cache
def bundle(name: str) -> str:
    """A module and everything that it imports as one classic script.

    Every module becomes a function that returns what it exports, so that names of different modules
    do not meet. It takes the forms of import and export that the page uses, and refuses others.
    """
    done: dict[str, str] = {}

    def add(name: str, within: tuple[str, ...]) -> None:
        if name in within:
            raise ValueError(f"modules import each other: {' -> '.join((*within, name))}")
        if name in done:
            return
        text = page_file(name).decode()
        for found in _IMPORT.finditer(text):
            add(found[2], (*within, name))
        done[name] = _as_function(name, text)

    add(name, ())
    return '"use strict";\n' + "\n".join(done.values())


def _as_function(name: str, text: str) -> str:
    names = [
        part.strip()
        for found in _EXPORT.finditer(text)
        for part in (found[1] or found[2]).split(",")
        if part.strip()
    ]
    text = _EXPORT.sub("", text)
    text = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(found[2])};", text)
    left = re.search(r"^(?:import|export)\b.*", text, re.MULTILINE)
    if left is not None:
        raise ValueError(f"{name} has an import or export of another form: {left[0][:80]}")
    return f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();"


def _variable(name: str) -> str:
    """A JavaScript name for a module.

    Example:
        >>> _variable("main.js")
        'module_main_js'
    """
    return "module_" + re.sub(r"\W", "_", name)


def _inert(data: Json) -> str:
    """JSON that ends no element, whatever its texts say.

    Example:
        >>> _inert({"text": "</script>"})
        '{"text":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
