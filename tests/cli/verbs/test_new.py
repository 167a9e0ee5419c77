"""`mlotool new`: what it writes is valid, runs, and passes its own tests; nothing is ever written over."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlotool
from mlotool.config.security import trusted
from tests import forked
from tests.cli.conftest import Call

ROOT = Path(mlotool.__file__).parents[1]
# Of a name that nothing else in this process has.
NAME = "shiny_moons"


@pytest.fixture
def written(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write the package; return what was printed."""
    monkeypatch.setattr(trusted, "_packages", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, err = call("new", NAME)
    assert (code, err) == (0, "")
    yield out
    for name in [each for each in sys.modules if each.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.mark.usefixtures("pages")
def test_the_commands_that_it_prints_work(call: Call, written: str, tmp_path: Path) -> None:
    commands = [shlex.split(line)[1:] for line in written.splitlines() if line.startswith("  mlotool ")]
    assert [words[0] for words in commands] == ["run", "validate"]
    for words in commands:
        short = ["debug=fast", "logger=csv", "runner.progress_bar=false"] if words[0] == "run" else []
        code, _, err = call(*words, *short)
        assert code == 0, err
        assert "warning" not in err
    [run] = (tmp_path / "outputs" / NAME).iterdir()
    assert (run / "report.html").is_file() and "rates/learned_value_1" in (run / "metrics.csv").read_text()


def _pytest(words: list[str]) -> int:
    # `python -m pytest` finds what is in the working folder.
    sys.path.insert(0, "")
    return pytest.main(words)


def test_its_tests_pass_with_warnings_as_errors(written: str, tmp_path: Path) -> None:
    [command] = [line.split() for line in written.splitlines() if line.startswith("  python -m pytest")]
    assert command == ["python", "-m", "pytest", NAME]
    # Hydra, which has a plugin of pytest, is imported before pytest.
    words = [*command[3:], "-q", "-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = forked.run(_pytest, [*words, "-p", "no:cacheprovider"], folder=tmp_path, environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed" in result.stdout


def test_has_nothing_of_the_template_s_name(written: str, tmp_path: Path) -> None:
    files = list((tmp_path / NAME).iterdir())
    assert {f"{NAME}.yaml", f"test_{NAME}.py", "__init__.py"} < {file.name for file in files}
    assert not [file for file in files if "mypackage" in file.name + file.read_text()]
    # Who is refused once may ask again: nothing but the package was written.
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


BAD_NAMES = {
    "my-package": "mlotool new my_package",
    "class": "mlotool new my_class",
    "path/to/moons": "mlotool new path_to_moons",
    "\x1b[31mred": "mlotool new",
    "a" * 300: "at most 60",
    "json": "mlotool new my_json",
    "recipes": "a folder that mlotool uses",
}


def test_bad_names_are_refused_with_a_better_one(call: Call, tmp_path: Path) -> None:
    for name, better in BAD_NAMES.items():
        code, out, err = call("new", name)
        assert (code, out) == (2, "")
        assert better in err and "\x1b" not in err
    assert not list(tmp_path.iterdir())


def test_never_writes_over_anything(call: Call, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "module.py").write_text("mine")
    before = sorted(tmp_path.iterdir())
    for place in before:
        code, _, err = call("new", place.stem)
        assert code == 2 and f"found '{place.name}' in the working folder already" in err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "module.py").read_text() == "mine"
