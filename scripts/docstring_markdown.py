"""For the API reference: docstrings as Markdown, since that is what the pages are made of."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`[~.]?([^`]+)`")
_DOCTEST = re.compile(r"(?m)^( *)>>> .*(?:\n *\S.*)*")


class DocstringMarkdown(griffe.Extension):
    """Turns cross-references into code, and doctests into code blocks."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite a docstring once it is read."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)
