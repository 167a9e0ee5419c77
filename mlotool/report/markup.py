"""HTML and SVG by construction: whatever is not already markup is escaped."""

from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "br", "hr", "img", "link", "input", "wbr"})


class Markup(str):
    """Text that is HTML already and goes into the page as it stands."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return `<name ...>children</name>`; plain strings among children and all attributes are escaped.

    Args:
        name: the tag.
        children: Markup stays, other strings are escaped.
        attributes: `class_` writes `class`, `stroke_width` writes `stroke-width`; None leaves the attribute out.

    Example:
        >>> element("p", "1 < 2", element("b", "yes"), class_="note")
        '<p class="note">1 &lt; 2<b>yes</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Return the children side by side, escaped where they are not Markup."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child, quote=False) for child in children))


def details(summary: str, *children: str) -> Markup:
    """Return a block that the reader can open."""
    return element("details", element("summary", summary), *children)
