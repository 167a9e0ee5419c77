from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call


@pytest.fixture
def complete(call: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    def ask(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        code, out, err = call("-sc", "query=bash")
        assert (code, err) == (0, "")
        return out.split()

    return ask


OFFERS = {
    "sh": "show", "": "validate", "run m": "mwn", "copy m": "mwn", "run +recipe=": "+recipe=mwn",
    "run mwn hypergradient=f": "hypergradient=finite_difference",
    "run mwn model@problems.classifier.module=res": "model@problems.classifier.module=resnet8",
    "run mwn problems.classifier.op": "problems.classifier.optimizer.",
    "run mwn --trust mypackage data=dig": "data=digits", "run -m mwn,plain problems.": "problems.reweight.",
    "run mwn hypergradient=neumann hypergradient.solver.": "hypergradient.solver.num_terms=",
    "run mwn data.root=./": "data.root=./here", "run here/mine.yaml na": "name=",
}  # fmt: skip


@pytest.mark.parametrize("line", OFFERS)
def test_offers(complete: Callable[[str], list[str]], tmp_path: Path, line: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.yaml").write_text("# @package _global_\nname: mine\n")
    assert OFFERS[line] in complete(f"mlotool {line}")


def test_offers_nothing_where_the_line_is_wrong(complete: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "loop.yaml").write_text("# @package _global_\ndefaults: [loop]\n")
    for line in ("a b hyper", "nowhere se", "nowhere.yaml se", "mwn data=nothing se", "loop problems."):
        assert complete(f"mlotool run {line}") == []


def test_fish_wants_a_line_each(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "mlotool run mwn hypergradient=c")
    assert call("-sc", "query=fish")[1] == "hypergradient=cg\nhypergradient=cg_convex\n"
    monkeypatch.setenv("COMP_LINE", "mlotool re")
    assert call("-sc", "query=fish")[1] == "report\n"
    monkeypatch.setenv("COMP_LINE", "mlotool ")
    assert "run\n" in call("-sc", "query=fish")[1]


def test_install_prints_a_script_for_mlotool(call: Call) -> None:
    for shell in ("bash", "zsh", "fish"):
        code, out, _ = call("-sc", f"install={shell}")
        assert code == 0 and "mlotool" in out
    code, _, err = call("-sc", "install=tcsh")
    assert code == 2 and "bash" in err
