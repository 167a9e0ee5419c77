"""What the reference reads differently from docstrings: `Example:` begins a section of code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Let the section `Example:` be the one that Google's style calls `Examples:`, whose prompts are code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object, once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
