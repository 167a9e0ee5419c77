"""Every block of code of the tutorials runs, and prints what the page says."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.docs.pages import blocks, run_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "concepts.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
SLOW = ("architecture_search",)


@pytest.fixture(autouse=True)
def forgotten_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let a page import the packages that it writes, and leave nothing of them imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


# A rehearsal of six ticks has much to warn of.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else []) for page in PAGES]
)
def test_its_code_runs(page: Path, call: Callable[..., Result]) -> None:
    assert run_page(page, call) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('```python\nprint(1)\n```\n```text title="output"\n2\n```\n', "line 4: printed '1"),
        ("```bash\nmlotool run nothing.yaml\n```\n", "nothing.yaml"),
        ("```python\n1 / 0\n```\n", "division by zero"),
    ],
)
def test_what_does_not_run_is_found(text: str, message: str, tmp_path: Path, call: Callable[..., Result]) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises((AssertionError, ZeroDivisionError), match=message):
        run_page(tmp_path / "page.md", call)


def test_blocks_in_lists_lose_their_indent() -> None:
    [block] = blocks('1. First\n\n    ```yaml title="a.yaml"\n    a:\n      b: 1\n    ```\n')
    assert (block.title, block.code, block.line) == ("a.yaml", "a:\n  b: 1\n", 3)
