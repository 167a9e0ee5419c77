"""Small files that once took minutes or printed megabytes: each verb ends soon, and says what is too much."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.cli.hostile import HEADER, LARGE

Call = Callable[..., Result]
MAX_OUTPUT = 20_000
"""Characters; `show` prints a recipe and its graph, of 10 kB here, and may print three times as many."""
# Seconds; on an idle core each takes less than two.
LIMIT = 20
VERBS = ("validate", "show", "copy")


def _call_within(call: Call, *words: str) -> Result:
    start = time.monotonic()
    result = call(*words)
    assert time.monotonic() - start < LIMIT, words
    assert sum(map(len, result[1:])) < (3 if words[0] == "show" else 1) * MAX_OUTPUT, words
    return result


@pytest.fixture
def large(tmp_path: Path) -> Callable[[str], str]:
    def write(name: str) -> str:
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes" / "large.yaml").write_text(HEADER + LARGE[name][0] + "\n")
        return "large"

    return write


@pytest.mark.parametrize("name", LARGE)
def test_validate_ends_with_a_short_message(call: Call, large: Callable[[str], str], name: str) -> None:
    code, out, err = _call_within(call, "validate", large(name))
    assert code == 2, out
    assert LARGE[name][1] in err


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_other_verb_ends_too(
    call: Call, large: Callable[[str], str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = large(name)
    monkeypatch.setenv("COMP_LINE", f"mlotool run {recipe} problems.")
    for words in (["show", recipe], ["run", recipe], ["copy", recipe, "copied.yaml"], ["list"], ["-sc", "query=bash"]):
        assert _call_within(call, *words)[0] in (0, 2)


def test_inherited_recipes_count_together(call: Call, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for index in range(60):
        below = f"chain{index + 1}" if index < 59 else "plain"
        (tmp_path / "recipes" / f"chain{index}.yaml").write_text(f"{HEADER}defaults: [{below}, _self_]\n")
    code, _, err = _call_within(call, "validate", "chain0")
    assert code == 2
    assert "files, with the recipes that it inherits from; expected at most 50" in err
