"""Sweep folders of a stranger: whichever verb reads one, nothing outside is read or written, and it ends soon."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.cli.hostile_folders import SECRET
from tests.cli.hostile_sweeps import SWEEPS
from tests.cli.spoiled import Spoil, made_by, spoiling
from tests.cli.test_hostile_folders import WORDS, in_time

Call = Callable[..., Result]
SWEEP = (*WORDS[:1], "-m", *WORDS[1:], "seed=1,2", "runner.max_ticks=2")

# Of each kind one; all of them with `-m slow`, which goes on with each, too.
QUICK = (
    "records_behind_links",
    "pages_behind_links",
    "another_folder_as_a_job",
    "pipes",
    "a_billion_laughs",
    "records_of_other_types",
    "more_jobs_than_atoms",
    "logarithms_of_what_has_none",
    "summaries_of_other_types",
    "searches_of_other_types",
    "searches_without_end",
    "commands_to_the_terminal",
    "names_that_are_no_texts",
    "scripts",
    "formulas",
    "words_that_call",
    "records_of_groups",
)
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SWEEPS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of two jobs, below work/outputs/plain/multirun."""
    return made_by(SWEEP, tmp_path_factory)


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoil]:
    """Spoil a copy of the sweep by a builder's name; in the end nothing outside has changed."""
    with spoiling(SWEEPS, whole, "outputs/plain/multirun", tmp_path, monkeypatch) as spoil:
        yield spoil


def _check(sweep: Path, result: Result) -> None:
    code, out, err = result
    assert code in (0, 1, 2)
    assert "not foreseen" not in err, err
    assert not any(f"{name}Error:" in err for name in ("Type", "Value", "Key", "Index", "Attribute", "Unicode")), err
    assert SECRET not in out + err
    assert all(each.isprintable() or each in "\n\t" for each in out + err)
    assert len(out + err) < 200_000
    for file in sweep.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1:
            assert SECRET.encode() not in file.read_bytes(), file


def test_there_are_forty() -> None:
    assert len(SWEEPS) >= 40


@pytest.mark.parametrize("name", EVERY)
def test_a_report_reads_and_writes_nothing_outside(name: str, folder: Spoil, call: Call) -> None:
    sweep = folder(name)
    os.chdir(sweep.parents[3])
    words = ("report", str(sweep.relative_to(Path.cwd())))
    with in_time(words):
        result = call(*words)
    _check(sweep, result)
    page = sweep / "sweep.html"
    if page.is_file() and not page.is_symlink() and page.stat().st_nlink == 1:
        text = page.read_text(errors="replace")
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert len(text) < 20_000_000


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "folder"])
@pytest.mark.parametrize("name", SWEEPS)
def test_going_on_reads_and_writes_nothing_outside(name: str, resume: str, folder: Spoil, call: Call) -> None:
    sweep = folder(name)
    os.chdir(sweep.parents[3])
    words = (*SWEEP, "resume=auto" if resume == "auto" else f"resume={sweep.relative_to(Path.cwd())}")
    with in_time(words):
        result = call(*words)
    _check(sweep, result)
