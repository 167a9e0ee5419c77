import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mlotool
from tests.cli.conftest import Result

Call = Callable[..., Result]


@pytest.fixture
def complete(call: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    def ask(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        code, out, err = call("-sc", "query=bash")
        assert (code, err) == (0, "")
        return out.split()

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mlotool sh", "show"),
        ("mlotool ", "validate"),
        ("mlotool run +recipe=", "+recipe=mwn"),
        ("mlotool run ", "mwn"),
        ("mlotool run m", "mwn"),
        ("mlotool show m", "mwn"),
        ("mlotool copy m", "mwn"),
        ("mlotool run +recipe=mwn hypergradient=", "hypergradient=cg"),
        ("mlotool run mwn hypergradient=f", "hypergradient=finite_difference"),
        ("mlotool run mwn model@problems.classifier.module=res", "model@problems.classifier.module=resnet8"),
        ("mlotool show mwn +optimizer@a.b=", "+optimizer@a.b=sgd"),
        ("mlotool run mwn problems.classifier.op", "problems.classifier.optimizer."),
        ("mlotool run -m +recipe=mwn runner.max", "runner.max_ticks="),
        ("mlotool run mwn --trust mypackage data=dig", "data=digits"),
        ("mlotool run -m mwn,plain problems.", "problems.reweight."),
        ("mlotool run mwn hypergradient=neumann hypergradient.solver.", "hypergradient.solver.num_terms="),
        ("mlotool run mwn +op", "+optimizer="),
        ("mlotool run mwn ~de", "~debug"),
        ("mlotool run mwn ~data=dig", "~data=digits"),
        ("mlotool run mwn ++se", "++seed="),
        ("mlotool run mwn runner.det", "runner.deterministic="),
        ("mlotool run mwn runner.deterministic=", "runner.deterministic=true"),
        ("mlotool run mwn evaluate.metrics.", "evaluate.metrics.0="),
        ("mlotool run mwn hydra.sweep.d", "hydra.sweep.dir="),
        ("mlotool run mwn data.root=./", "data.root=./here"),
        ("mlotool run here/mine.yaml na", "name="),
        ("mlotool run here/mine.yaml name=", "name=mine"),
    ],
)
def test_offers(complete: Callable[[str], list[str]], tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.yaml").write_text("# @package _global_\nname: mine\n")
    assert expected in complete(line)


@pytest.mark.parametrize(
    "line", ["a b hyper", "nowhere se", "nowhere.yaml se", "mwn data=nothing se", "loop problems."]
)
def test_offers_nothing_where_the_line_is_wrong(
    complete: Callable[[str], list[str]], tmp_path: Path, line: str
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "loop.yaml").write_text("# @package _global_\ndefaults: [loop]\n")
    assert complete(f"mlotool run {line}") == []


def test_offers_nothing_that_a_shell_would_run(complete: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# @package _global_\nname: $(id)\nanalyses: {a: {x: $(id)}}\n")
    assert complete("mlotool run mine name=") == []
    assert complete("mlotool run mine analyses.a.x=") == []


LINES = ["", "run +recipe=", "run mwn hypergradient="]


@pytest.mark.parametrize("line", LINES)
def test_does_not_wait_for_hydra(tmp_path: Path, line: str) -> None:
    program = (
        "import sys; from mlotool.cli.main import main; main(['-sc', 'query=bash']);"
        "sys.exit(str(sys.modules.keys() & {'hydra', 'omegaconf', 'torch'}))"
    )
    folder = str(Path(mlotool.__file__).parents[1])
    environment = {**os.environ, "COMP_LINE": f"mlotool {line}", "PYTHONPATH": folder}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert result.stdout.strip()
    assert result.stderr.strip() == "set()"


def test_fish_wants_a_line_each(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "mlotool run mwn hypergradient=c")
    assert call("-sc", "query=fish")[1] == "hypergradient=cg\nhypergradient=cg_convex\n"
    monkeypatch.setenv("COMP_LINE", "mlotool re")
    assert call("-sc", "query=fish")[1] == "report\n"
    monkeypatch.setenv("COMP_LINE", "mlotool ")
    assert "run\n" in call("-sc", "query=fish")[1]


def test_keeps_to_the_prefix(complete: Callable[[str], list[str]]) -> None:
    assert complete("mlotool val") == ["validate"]


def test_own_recipes_are_offered(complete: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# @package _global_\n")
    assert "+recipe=mine" in complete("mlotool run +recipe=m")


def test_bash_takes_a_placed_option_as_one_word(call: Call) -> None:
    assert "COMP_WORDBREAKS//[=@]" in call("-sc", "install=bash")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_prints_a_script_for_mlotool(call: Call, shell: str) -> None:
    code, out, _ = call("-sc", f"install={shell}")
    assert code == 0
    assert "mlotool" in out


def test_unknown_shell_is_refused(call: Call) -> None:
    code, _, err = call("-sc", "install=tcsh")
    assert code == 2
    assert "bash" in err
