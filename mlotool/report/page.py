"""The templates of the pages: whatever reaches them is escaped, unless it is markup that was made here."""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mlotool.report.figure import css_variables
from mlotool.report.formats import duration, number, shortened

# A recipe is anybody's text: should any of it ever reach the page as markup, the browser still loads and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
SIGNS = {
    "finished": "✓", "pruned": "✂", "failed": "✕", "infeasible": "∅", "interrupted": "❙❙", "running": "●",
    "unfinished": "?", "unknown": "?",
}  # fmt: skip


def read_text(name: str) -> Markup:
    """Return a file of this package as it stands."""
    return Markup(files("mlotool.report").joinpath(name).read_text(encoding="utf-8"))


TEMPLATES = Environment(
    loader=PackageLoader("mlotool.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
TEMPLATES.filters |= {"number": number, "duration": duration, "shortened": shortened}
TEMPLATES.globals |= {"signs": SIGNS, "read_text": read_text}


def render(template: str, **values: Any) -> Markup:
    """Return a template of this package, filled in; its texts are escaped."""
    return Markup(TEMPLATES.get_template(template).render(values))


def page(template: str, title: str, script: str = "", **values: Any) -> str:
    """Return a whole page, with its style in it.

    Args:
        template: of its body; it extends page.html.
        title: of the window.
        script: the file of a script of ours: the policy allows it by its hash, and no other.
        values: what the template fills in.
    """
    text = read_text(script) if script else Markup()
    allowed = f"; script-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" if script else ""
    values |= {"title": title, "policy": POLICY + allowed, "script": text, "variables": Markup(css_variables())}
    return f"{render(template, **values)}\n"
