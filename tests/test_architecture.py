"""docs/architecture.md names files and functions that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]


def named(text: str) -> list[tuple[str, str]]:
    """Return what stands in backquotes as `folder/file.py` or `folder/file.py: name`, a pair each."""
    return re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|yaml|md))(?:: (\w+)[^`]*)?`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    missing = []
    for path, name in named(page.read_text()):
        places = [ROOT / path, ROOT / "mlotool" / path, ROOT / "mlotool" / "layerparallel" / path, page.parent / path]
        found = next((place for place in places if place.is_file()), None)
        if found is None or (name and not re.search(rf"^\s*(def|class) {name}\b|^{name}\b", found.read_text(), re.M)):
            missing.append(f"{path}: {name}")
    assert not missing
