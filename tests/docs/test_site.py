"""The site's build says what is broken."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.docs.pages import FENCE, PAGES, ROOT

MADE = re.compile(r"(reference|gallery|runs)/|notebook\.md$")
"""Pages that are made by `make docs`."""
OPTIONS = re.findall(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())[0].split()


def test_a_broken_link_fails(tmp_path: Path) -> None:
    """With the options of `make docs`: `--quiet` would hide the warnings from `strict`."""
    rules = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("\nvalidation:")[1].split("\nnav:")[0])
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({"site_name": "x", "strict": True, "validation": rules}))
    (tmp_path / "docs").mkdir()
    links = ("[a](nothing.md)", "[a](index.md#no_place)", "![a](no_picture.png)")
    for text in ("", "\n".join(links)):
        (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
        command = [sys.executable, "-m", "mkdocs", "build", *OPTIONS]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) is bool(text), done.stderr
    assert all(place in done.stderr for place in ("nothing", "no_place", "no_picture"))


def test_links_lead_to_files_in_the_repository() -> None:
    """As whoever reads the files themselves follows them; `make docs` looks at those of the site."""
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or MADE.search(target) or (page.parent / target).exists(), f"{page}: {target}"
