"""Every block of code of the documentation runs, and prints what the page says."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.docs.pages import FENCE, OF_A_RUN, PAGES, ROOT, run_page

OWN_TEST = ("first_change",)
"""Pages whose blocks another test runs."""

TRAINED = ("own_problem", "python", "coming_from", "three_levels", "meta_learning", "sweep")
"""Pages that print what trainings of seconds end with: rehearsed, and run as they stand by a test that is slow."""

WITH_CODE = [page for page in PAGES if FENCE.search(page.read_text(encoding="utf-8")) and page.stem not in OWN_TEST]
GOING_ON = [page for page in WITH_CODE if page.stem in TRAINED or OF_A_RUN.search(page.read_text(encoding="utf-8"))]
"""With commands that go on with what earlier ones have left, these as well."""
INDENTED = re.compile(r"^\n {4,}\S", re.M)


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
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT).with_suffix("")))
def test_its_code_runs(page: Path, call: Call) -> None:
    assert run_page(page, call, is_rehearsal=page.stem in TRAINED, goes_on=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", GOING_ON, ids=lambda page: page.stem)
def test_its_trainings_end_as_it_says(page: Path, call: Call) -> None:
    assert run_page(page, call)


def test_no_code_stands_outside_of_a_fenced_block() -> None:
    """Code that is only indented would be shown, and not run. A block in a list or a tab is fenced as well."""
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        assert "```" not in text and "~~~" not in text, page
        for found in INDENTED.finditer(text):
            before = text[: found.start()].rstrip("\n").splitlines()
            assert before and before[-1].startswith(("- ", "===", "    ", "1. ")), f"{page}: {found[0]}"
