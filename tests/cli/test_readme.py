"""What the README and the pages beside it show works: recipe, commands in their order, links, Python."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import mlotool
from mlotool.cli.main import VERBS
from tests.cli.conftest import Result

Call = Callable[..., Result]
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_ORDER = [line.split(" #")[0].strip() for line in README.splitlines() if line.startswith("    mlotool ")]
ONE_RECIPE = re.compile(r"^ {4}(mlotool run (?!-m)\+recipe=\w[^#\n]*)", re.MULTILINE)
COMMANDS = sorted({found.strip() for page in PAGES for found in ONE_RECIPE.findall(page.read_text())})
# What takes seconds is made fast, and is otherwise as it stands.
FAST = ("debug=fast", "logger=csv", "runner.progress_bar=false")


@pytest.fixture(autouse=True)
def forgotten_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave nothing imported of the packages that the pages write."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mypackage", "rings")]:
        del sys.modules[name]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    [text] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    return tmp_path / "mine.yaml"


def test_its_recipe_is_valid_and_runs(call: Call, recipe: Path, tmp_path: Path) -> None:
    assert call("validate", recipe.name)[0] == 0
    code, _, err = call("run", recipe.name, "debug=fast", "logger=csv", "runner.progress_bar=false")
    assert code == 0, err
    [folder] = (tmp_path / "outputs" / "mine").iterdir()
    assert (folder / "report.html").is_file()


def test_its_recipe_is_the_measured_one(recipe: Path) -> None:
    """All that trains is as in mwn, whose result the README gives."""
    shown, measured = (OmegaConf.to_container(mlotool.compose(name), resolve=True) for name in (str(recipe), "mwn"))
    assert isinstance(shown, dict)
    assert isinstance(measured, dict)
    for part in ("problems", "graph", "evaluate", "runner", "data", "hypergradient", "objective"):
        assert shown[part] == measured[part], part


@pytest.mark.slow
def test_its_commands_run_in_their_order(call: Call) -> None:
    assert any(command.startswith("mlotool run") for command in IN_ORDER)
    for command in IN_ORDER:
        # As many seeds as it takes to be several.
        words = shlex.split(command.replace("range(0,32)", "range(0,3)"))[1:]
        code, _, err = call(*words, *(FAST if words[0] == "run" else ()))
        assert code == 0, f"{command}: {err}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_all_pages_compose(call: Call, command: str) -> None:
    words = [word for word in shlex.split(command)[2:] if not word.startswith(("resume=", "decisions=outputs/"))]
    assert call("validate", *words)[0] == 0


def test_it_has_every_verb() -> None:
    assert all(f"`mlotool {verb}" in README for verb in VERBS)


def test_it_is_three_screens() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        # Made by `make docs`, which finds each broken link of the site.
        if target.startswith("reference/"):
            continue
        assert "://" in target or (page.parent / target).exists(), target


def test_the_page_of_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    # Fewer ticks, and no W&B: the rest is as it stands.
    for slow, fast in (('"runner.max_ticks=500"', '"debug=fast", "logger=csv"'), ("range(1000)", "range(20)")):
        assert slow in code
        code = code.replace(slow, fast)
    namespace: dict[str, object] = {}
    exec(compile(code, "docs/python.md", "exec"), namespace)
    assert namespace["program"].gradient("decay")["log"].isfinite()  # type: ignore[attr-defined]


def test_the_page_of_spaces_runs() -> None:
    text = (ROOT / "docs" / "spaces.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    namespace: dict[str, object] = {}
    exec(compile(code, "docs/spaces.md", "exec"), namespace)
    assert "padding=(2, 2)" in str(namespace["model"]) and {"Norms", "Net"} <= namespace.keys()


def test_the_page_of_own_code_runs(call: Call, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "own_code.md").read_text()
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    assert "without an __init__.py" in call("validate", "mwn", "--trust", "mypackage")[2]
    (tmp_path / "mypackage" / "__init__.py").touch()
    [recipe] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(recipe)
    option = "\n".join(re.findall(r"^ {4}(\S.*)", text.partition("# conf/data/rings.yaml\n")[2], re.MULTILINE))
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "rings.yaml").write_text(option)
    for extra in ((), ("data=rings",)):
        code, out, err = call("run", "mine.yaml", "--trust", "mypackage", *FAST, *extra)
        assert code == 0, err
        assert "val/confidence" in out
