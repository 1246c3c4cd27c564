"""How docstrings become pages (a griffe extension, named in mkdocs.yml).

Ours say `Example:`; griffe knows `Examples:`, and would show the other as a note whose `>>>` lines
are quotations.
"""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Examples(Extension):
    """Turns `Example:` into the section that griffe knows, for every object."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
