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


def test_the_way_from_a_line_to_its_equation_has_three_jumps_at_most() -> None:
    text = PAGES[0].read_text()
    walks = text.split("## From a recipe's line to the equation")[1].split("## ")[0]
    lines = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in walks.splitlines() if line.startswith("| `")}
    for line in ("unroll_steps: 2", "hypergradient: cg", "parallel: penalty", "runner.devices: 2"):
        assert len(lines[f"`{line}`"]) <= 3 and all(named(jump) for jump in lines[f"`{line}`"])
