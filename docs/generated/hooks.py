"""What MkDocs calls while it builds the site: pages that are made from the code, and links out of docs/."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import mlotool  # noqa: E402
from docs.generated import api, errors, gallery, keys, notebook, options  # noqa: E402

TAKEN = {
    "benchmarks/README.md": "benchmarks/README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the repository outside of docs/, with the place that the site gives them."""
FOR_MAINTAINERS = (
    "internals/",
    "decisions/",
    "benchmarks/",
    "plan.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "dependencies.md",
)
"""Addresses whose pages a search shows after all others."""
PICTURE = re.compile(r"\]\((?:\.\./)*(?:benchmarks/)?(results/[\w/.-]+\.png)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version in the header of each page."""
    config.site_name = f"mlotool {mlotool.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and those from outside of docs/."""
    of_notebook, drawn = notebook.page()
    made = {
        "reference/keys.md": keys.page(),
        "reference/options.md": options.page(),
        "reference/errors.md": errors.page(),
        f"{notebook.ADDRESS}.md": of_notebook,
        **dict(api.pages()),
        **dict(gallery.pages()),
    }
    for address, text in made.items():
        files.append(File.generated(config, address, content=text))
    for address, picture in drawn.items():
        files.append(File.generated(config, address, content=picture))
    files.append(File.generated(config, "assets/graphs.css", content=gallery.style()))
    for source, address in TAKEN.items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / source)))
    pages = [ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    pictures = {found for page in pages for found in PICTURE.findall(page.read_text())}
    for picture in sorted(pictures):
        path = ROOT / "benchmarks" / picture
        files.append(File.generated(config, f"benchmarks/{picture}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ end at the places of those pages in the site, and say what a search shows first."""
    address = page.file.src_uri
    # What users look for comes before what maintainers keep.
    page.meta.setdefault("search", {"boost": 0.3 if address.startswith(FOR_MAINTAINERS) else 1})
    if address in TAKEN.values():
        return _inside(markdown, address)
    depth = "../" * address.count("/")
    return re.sub(
        rf"\]\({re.escape(depth)}\.\./(benchmarks/|CONTRIBUTING\.md|CHANGELOG\.md)", rf"]({depth}\1", markdown
    )


def _inside(markdown: str, address: str) -> str:
    """Return a page from outside of docs/ with links as they are in the site; what the site lacks stays as text."""
    depth = "../" * address.count("/")

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if target.startswith(("http", "#", "results/")):
            return found[0]
        path = target.removeprefix("../" if depth else "")
        if path.startswith("docs/"):
            return f"[{text}]({depth}{path.removeprefix('docs/')})"
        if path.split("#")[0] in TAKEN:
            return f"[{text}]({depth}{path})"
        return text

    markdown = markdown.replace("](../docs/images/", f"]({depth}images/")
    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, markdown)
