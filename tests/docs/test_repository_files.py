"""Files that a hosting service reads are what it expects."""

from pathlib import Path

import pytest
import yaml

import mlotool

ROOT = Path(__file__).parents[2]


def test_the_citation_has_the_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == mlotool.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(found)


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda file: file.stem
)
def test_issue_forms(form: Path) -> None:
    found = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(found)
    ids = [each["id"] for each in found["body"]]
    assert len(ids) == len(set(ids))
    assert all(
        each["type"] in ("textarea", "input", "dropdown") and each["attributes"]["label"] for each in found["body"]
    )
