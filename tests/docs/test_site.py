"""The site's build says what is broken."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import FENCE, PAGES, ROOT

MADE = re.compile(r"(reference|gallery|runs)/|notebook\.md$")
"""Pages that are made by `make docs`."""
OPTIONS = re.findall(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())[0].split()


@pytest.mark.parametrize("text", ["[a](nothing.md)", "[a](index.md#nothing)", "![a](nothing.png)"])
def test_a_broken_link_fails(text: str, tmp_path: Path) -> None:
    """With the options of `make docs`: `--quiet` would hide the warnings from `strict`."""
    site = (ROOT / "mkdocs.yml").read_text()
    config = {
        "site_name": "x",
        "strict": True,
        "validation": yaml.safe_load(site.split("\nvalidation:")[1].split("\nnav:")[0]),
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "docs").mkdir()
    results = []
    for page in ("", text):
        (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{page}\n")
        command = [sys.executable, "-m", "mkdocs", "build", *OPTIONS]
        results.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False))
    assert results[0].returncode == 0, results[0].stderr
    assert results[1].returncode != 0 and "nothing" in results[1].stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_in_the_repository(page: Path) -> None:
    """As whoever reads the files themselves follows them; `make docs` looks at those of the site."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" in target or MADE.search(target):
            continue
        assert (page.parent / target).exists(), target
