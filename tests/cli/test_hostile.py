"""Recipes, run folders and sweeps of a stranger: whichever verb reads one, nothing runs or is read or written outside.

Each ends soon, with one clear error where it is refused.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from shutil import copytree

import pytest

import mlotool
from mlotool.cli.main import main
from mlotool.core.errors import MlotoolError
from tests.cli.conftest import Call, Result
from tests.cli.hostile import CHECKPOINTS, HEADER, RECIPES, RUNS, SECRET, SWEEPS, Builder

# Of this process's own work; two are usual.
SECONDS = 20
ONE_OF_EACH_KIND = ("callback", "python-apply", "environment", "upload", "target", "sweep-of-upload")
OTHER_VERBS = (["show"], ["copy"], ["check"], ["run", "-m", "seed=0,1"], ["run", "--cfg", "job", "--resolve"])
ONLY_READ_BY = {
    "evaluate": ("a_billion_laughs", "a_config_that_looks_elsewhere", "a_config_that_reads_the_environment",
                 "a_config_that_downloads", *(f"a_checkpoint_{spoil.__name__}" for spoil in CHECKPOINTS[1:])),
    "report": ("pages_behind_links", "artifacts_that_lie_by_names_of_commands", "more_jobs_than_atoms"),
    "run": ("places_that_loggers_write_to", "another_folder_as_a_job"),
}  # fmt: skip
"""Runs and sweeps that go to one verb, which reads what is spoiled; another one of their kind goes to all verbs."""
WORDS = ("runner.accelerator=cpu", "logger.wandb=false", "runner.report=false", "runner.progress_bar=false")
RUN = ("run", "plain", *WORDS, "runner.max_ticks=2")
SWEEP = ("run", "-m", "plain", *WORDS, "seed=1,2", "runner.max_ticks=2")


@contextmanager
def in_time(what: object) -> Iterator[None]:
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield
    assert time.process_time() - began < SECONDS, what


def check(result: Result, codes: Sequence[int] = (0, 1, 2)) -> None:
    """Assert what holds of whatever a verb has printed."""
    code, out, err = result
    assert code in codes, err
    assert "not foreseen" not in err, err
    assert code == 0 or "mlotool: " in err, err
    assert SECRET not in out + err and all(letter.isprintable() or letter in "\n\t" for letter in out + err)
    assert len(out + err) < 200_000


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path outside the working folder, which a payload that runs would make; and a secret."""
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside" / "canary"


@pytest.fixture
def write(tmp_path: Path, canary: Path) -> Callable[[str], Path]:
    """Write a hostile recipe by name into a working folder of its own."""

    def write_one(name: str) -> Path:
        folder = tmp_path / "work"
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "upload.yaml").write_text(f"{HEADER}mode: online\n")
        lines = RECIPES[name][0].replace("CANARY", str(canary))
        base = "" if "defaults:" in lines else "defaults: [plain, _self_]\n"
        (folder / "hostile.yaml").write_text(f"{HEADER}{base}{lines}\n", encoding="utf-8")
        return folder / "hostile.yaml"

    return write_one


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_of_a_recipe_runs(
    name: str, call: Call, write: Callable[[str], Path], canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(name)
    monkeypatch.chdir(file.parent)
    for verb in (["run"], ["validate", "--targets"]) if name in ONE_OF_EACH_KIND else (["run"],):
        with in_time(verb):
            result = call(*verb, str(file))
        check(result, codes=(2,))
        assert [word for word in RECIPES[name][1] if word not in result[2]] == [], result[2]
    # Hydra makes the folder of a run before its config is checked; the run's own is taken away again.
    outputs = file.with_name("outputs")
    assert {path for path in file.parent.rglob("*") if "parts" not in str(path)} <= {file, outputs, outputs / "plain"}
    for words in OTHER_VERBS if name in ONE_OF_EACH_KIND else ():
        # What only shows a target says no word on it.
        is_shown = words[0] in ("show", "copy") or (name == "target" and "--cfg" in words)
        with in_time(words):
            check(call(*words, str(file)), codes=(0, 1, 2) if is_shown else (1, 2))
    assert not canary.exists() and not list(file.parent.rglob("here"))


def test_inherited_recipes_count_together(call: Call, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for index in range(160):
        below = f"chain{index + 1}" if index < 159 else "plain"
        (tmp_path / "recipes" / f"chain{index}.yaml").write_text(f"{HEADER}defaults: [{below}, _self_]\n")
    code, _, err = call("validate", "chain0")
    assert code == 2 and "with the recipes that it inherits from; expected at most" in err


def made_by(words: Sequence[str], factory: pytest.TempPathFactory) -> Path:
    """Return a working folder in which a command has run."""
    work = factory.mktemp("whole")
    with chdir(work):
        assert main([*words]) == 0
    return work


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by(RUN, tmp_path_factory)


@pytest.fixture(scope="module")
def whole_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by(SWEEP, tmp_path_factory)


@contextmanager
def spoiled(builders: Mapping[str, Builder], name: str, whole: Path, parent: str, tmp_path: Path) -> Iterator[Path]:
    """Yield the only folder in `parent` of a copy, which becomes the working folder; outside nothing may change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    copytree(whole, tmp_path / "work", symlinks=True)
    os.chdir(tmp_path / "work")
    [folder] = (tmp_path / "work" / parent).iterdir()
    builders[name](folder, outside)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() if path.is_file() else b"" for path in outside.rglob("*")}

    before = contents()
    yield folder
    assert contents() == before
    for file in folder.rglob("*"):
        # A page or a table; no checkpoint as large as a disk.
        if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1 and file.stat().st_size < 10**8:
            content = file.read_bytes()
            assert SECRET.encode() not in content, file
            assert file.suffix != ".html" or (b"<script>alert" not in content and b"<img src=x" not in content)


def commands_of(name: str, *commands: Sequence[str]) -> Sequence[Sequence[str]]:
    """Return those of some commands that a run or a sweep goes to."""
    return [words for words in commands if name in ONLY_READ_BY[words[0]]] or commands


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_a_stranger(name: str, whole_run: Path, call: Call, tmp_path: Path) -> None:
    with spoiled(RUNS, name, whole_run, "outputs/plain", tmp_path) as run:
        resumed = (*RUN[:-1], "runner.max_ticks=3", f"resume={run}")
        for words in commands_of(name, ("evaluate", str(run), "--split", "test"), ("report", str(run)), resumed):
            with in_time(words):
                check(call(*words))
        try:
            mlotool.load(run, "classifier")
        except MlotoolError as error:
            assert SECRET not in str(error)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_of_a_stranger(name: str, whole_sweep: Path, call: Call, tmp_path: Path) -> None:
    with spoiled(SWEEPS, name, whole_sweep, "outputs/plain/multirun", tmp_path) as sweep:
        for words in commands_of(name, ("report", str(sweep)), (*SWEEP, f"resume={sweep}")):
            with in_time(words):
                check(call(*words))


def test_a_user_may_say_that_a_folder_downloads(call: Call, whole_run: Path, tmp_path: Path) -> None:
    with spoiled(RUNS, "a_config_that_downloads", whole_run, "outputs/plain", tmp_path) as run:
        words = ("evaluate", str(run), "--split", "test")
        check(result := call(*words), codes=(2,))
        assert "data.download: found True" in result[2] and "data.download=true" in result[2]
        wrong = call(*words, "data.downlod=true")
        assert wrong[0] == 2 and "Did you mean 'data.download'?" in wrong[2]
