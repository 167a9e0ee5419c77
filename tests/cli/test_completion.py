from collections.abc import Callable
from pathlib import Path

import pytest

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
    ],
)
def test_offers(complete: Callable[[str], list[str]], line: str, expected: str) -> None:
    assert expected in complete(line)


def test_offers_nothing_where_the_line_is_wrong(complete: Callable[[str], list[str]]) -> None:
    assert complete("mlotool run a b hyper") == []


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
