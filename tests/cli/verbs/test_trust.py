"""`mlotool trust`: remembered in the user's own settings, for one place on the disk, and for nobody else's folder."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlotool.config.security import trusted
from mlotool.config.security.remembered import settings_folder
from tests.cli.conftest import Call, Result
from tests.cli.user_package import RECIPE, write_package

Fresh = Callable[..., Result]
SAYS = "as `mlotool trust` has remembered"


@pytest.fixture
def fresh(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fresh:
    """Call the command line as a process of its own would be, in a folder: `fresh("mine", "validate", "mine.yaml")`."""
    for name in ("mine", "stranger"):
        (tmp_path / name).mkdir()
        write_package(tmp_path / name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = [*sys.path]

    def run(folder: str, *words: str) -> Result:
        monkeypatch.setattr(sys, "path", [*path])
        monkeypatch.setattr(trusted, "_packages", {})
        for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
            del sys.modules[name]
        monkeypatch.chdir(tmp_path / folder)
        return call(*words)

    return run


def test_it_is_remembered_said_listed_and_forgotten(fresh: Fresh, tmp_path: Path) -> None:
    code, _, err = fresh("mine", "validate", "mine.yaml")
    [line] = err.splitlines()
    assert code == 2 and "found 3 targets of the package 'mypackage'" in line and "--trust mypackage" in line
    assert "(data, problems.classifier.module, problems.classifier.loss)" in line
    assert fresh("mine", "trust", "mypackage")[0] == 0
    assert str(tmp_path / "mine") in fresh("mine", "trust")[1]
    for words in (("validate", "mine.yaml"), ("show", "mine.yaml")):
        code, _, err = fresh("mine", *words)
        assert code == 0 and err.count(SAYS) <= 1
    assert SAYS in fresh("mine", "validate", "mine.yaml")[2]
    # What does not name it does not load it, and nothing is said.
    assert SAYS not in fresh("mine", "validate", "plain")[2]
    assert fresh("mine", "trust", "mypackage", "--remove")[0] == 0
    assert fresh("mine", "validate", "mine.yaml")[0] == 2
    assert fresh("mine", "trust", "mypackage", "--remove")[0] == 2


def test_another_place_cannot_use_it(fresh: Fresh, tmp_path: Path) -> None:
    assert fresh("mine", "trust", "mypackage")[0] == 0
    stranger = tmp_path / "stranger"
    code, _, err = fresh("stranger", "validate", "mine.yaml")
    assert code == 2 and f"remembered another mypackage, in {tmp_path / 'mine'}" in err
    # Without a package there, the user's own one is not looked for: the folder would choose its arguments.
    shutil.rmtree(stranger / "mypackage")
    assert fresh("stranger", "validate", "mine.yaml")[0] == 2
    # A link to the remembered place, of the package and of a file in a package.
    (stranger / "mypackage").symlink_to(tmp_path / "mine" / "mypackage")
    assert fresh("stranger", "validate", "mine.yaml")[0] == 2
    (stranger / "mypackage").unlink()
    (stranger / "mypackage").mkdir()
    (stranger / "mypackage" / "__init__.py").symlink_to(tmp_path / "mine" / "mypackage" / "__init__.py")
    assert fresh("stranger", "validate", "mine.yaml")[0] == 2
    assert "mypackage" not in sys.modules
    # The remembered place leads elsewhere now.
    shutil.move(tmp_path / "mine" / "mypackage", tmp_path / "moved")
    (tmp_path / "mine" / "mypackage").symlink_to(tmp_path / "moved")
    assert fresh("mine", "validate", "mine.yaml")[0] == 2


@pytest.mark.parametrize("name", ["./mypackage", "../mine/mypackage", "os", "torch", "mypackage.models", "nothing"])
def test_what_is_no_package_of_the_users_is_not_remembered(fresh: Fresh, tmp_path: Path, name: str) -> None:
    code, _, err = fresh("mine", "trust", name)
    assert code == 2 and f"mlotool trust {name}" in err and not (tmp_path / "config").exists()


def test_a_folder_cannot_remember_itself(fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh("stranger", "trust", "mypackage")[0] == 0
    shutil.move(tmp_path / "config" / "mlotool", tmp_path / "stranger" / "mlotool")
    for value in (".", "", "stranger"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        monkeypatch.setenv("HOME", value or ".")
        assert settings_folder() is None
        assert fresh("stranger", "validate", "mine.yaml")[0] == 2
        assert "XDG_CONFIG_HOME" in fresh("stranger", "trust", "mypackage")[2]


@pytest.mark.parametrize("content", ['{"mypackage": 3}', '{"mypackage": [["a"], 3]}', "[]", "{"])
def test_settings_that_are_broken_trust_nothing(fresh: Fresh, tmp_path: Path, content: str) -> None:
    (tmp_path / "config" / "mlotool").mkdir(parents=True)
    (tmp_path / "config" / "mlotool" / "trust.json").write_text(content)
    code, _, err = fresh("mine", "validate", "mine.yaml")
    assert code == 2 and "not foreseen" not in err


def test_the_commands_that_are_printed_and_kept_work_for_another_person(fresh: Fresh, tmp_path: Path) -> None:
    code, out, _ = fresh("mine", "copy", "mine.yaml", "recipes/other.yaml", "--trust", "mypackage")
    assert code == 0 and out.endswith("mlotool run recipes/other.yaml --trust mypackage\n")
    assert (tmp_path / "mine" / "recipes" / "other.yaml").read_text().startswith(RECIPE.splitlines()[0])
    fresh("mine", "trust", "mypackage")
    code, _, err = fresh("mine", "run", "mine.yaml", "seed=1")
    assert code == 0 and err.count(SAYS) == 1
    fresh("mine", "trust", "mypackage", "--remove")
    [run] = (tmp_path / "mine" / "outputs" / "mine").iterdir()
    command = json.loads((run / "provenance.json").read_text())["command"]
    words = (run / "overrides.txt").read_text().splitlines()
    assert words == ["+recipe=mine", "seed=1", "--trust=mypackage"]
    assert fresh("mine", *shlex.split(command)[1:], "--cfg", "job")[0] == 0
    assert fresh("mine", "validate", "mine.yaml", *words[1:])[0] == 0
