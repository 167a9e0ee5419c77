"""Spaces of a stranger: each is refused before anything is trained, soon, with one clear error; nothing of it runs."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.cli.hostile import HEADER
from tests.cli.hostile_spaces import SPACES

Call = Callable[..., Result]
SECRET = "a-secret-of-the-environment"
# Seconds; on an idle core each takes less than two, the first one's imports ten, and long ones ten.
LIMIT = 60
LONG = ("counts:cells",)
# `show` tells of a decision that another problem may have.
SHOWN = ("decisions:unknown",)
MAX_OUTPUT = 3_000
"""Characters of a message."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in LONG else each for each in SPACES]
)
def test_it_is_refused(name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    lines, words = SPACES[name]
    (tmp_path / "hostile.yaml").write_text(f"{HEADER}{lines}\n")
    for verb in (["validate", "--targets"], ["run"], ["show", "--nodes", "classifier"]):
        began = time.monotonic()
        code, out, err = call(*verb, "hostile.yaml")
        assert time.monotonic() - began < LIMIT, verb
        assert code == (0 if verb[0] == "show" and name in SHOWN else 2), (verb, out, err)
        for word in words if code else ():
            assert word in err, (verb, err)
        assert SECRET not in out + err
        assert len(err) < MAX_OUTPUT, verb
    assert not list(tmp_path.rglob("here"))
    assert not list(tmp_path.rglob("checkpoints"))
