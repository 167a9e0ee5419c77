"""The site's build says what is broken; the README, the notebook and files for a hosting service are as they say."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from omegaconf import OmegaConf

import mlotool
from docs.generated import notebook
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


def test_the_citation_has_the_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == mlotool.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(found)


@pytest.mark.slow
# A kernel speaks over sockets of this machine.
@pytest.mark.filterwarnings("ignore")
def test_it_prints_what_it_shows() -> None:
    assert notebook.printed(notebook.executed()) == notebook.printed(nbformat.read(notebook.NOTEBOOK, as_version=4))


README = (ROOT / "README.md").read_text()


def test_its_recipe_is_the_measured_one(tmp_path: Path) -> None:
    """All that trains is as in mwn, whose result the README gives."""
    [text] = re.findall(r"```yaml title=\"mine.yaml\"\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    shown, measured = (
        OmegaConf.to_container(mlotool.compose(name), resolve=True) for name in (str(tmp_path / "mine.yaml"), "mwn")
    )
    assert isinstance(shown, dict) and isinstance(measured, dict)
    for part in ("problems", "graph", "evaluate", "runner", "data", "hypergradient", "objective"):
        assert shown[part] == measured[part], part
