from pathlib import Path

import pytest

from mlotool.core.files import at_home


@pytest.mark.parametrize("path", ["~nobody_of_that_name", "~nobody_of_that_name/x.yaml", "~~", "a/~", "~/"])
def test_a_home_that_is_not_there_is_a_place_without_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert str(at_home(path)) == {"~/": "/home/me"}.get(path, path)
    assert not (at_home(path) / "x").exists()


def test_a_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert at_home(Path("~") / "x") == Path("/home/me/x")
