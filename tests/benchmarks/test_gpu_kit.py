"""The kit of GPU checks: one that fails stops no other, and what was begun goes on."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import child, kit
from tests import forked

ROOT = Path(__file__).parents[2]


def call_forked(out: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and what is printed; neither the kit nor its checks import anything."""
    done = forked.run(_kit, ("--device", "cpu", "--out", str(out), *words), folder=ROOT)
    return done.returncode, done.stdout + done.stderr


def _kit(words: tuple[str, ...]) -> None:
    program.SECONDS_TO_END = 1.0
    program._start = lambda given: forked.start(_check, given, is_session=True)  # type: ignore[assignment, return-value]
    sys.argv = ["benchmarks.gpu", *words]
    program.main()


def _check(words: list[str]) -> None:
    sys.argv = ["benchmarks.gpu.child", *words]
    child.main()


def read(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


@pytest.mark.slow
def test_what_fails_stops_nothing_and_a_second_call_goes_on(tmp_path: Path) -> None:
    own = ("--checks", "tests.benchmarks.checks", "--minutes", "5", "--page")
    code, printed = call_forked(tmp_path, *own, "--state", str(tmp_path / "state.tar"))
    assert code == 1, printed
    reasons = {"crashing": "ended with exit code 3", "hanging": "did not end within 8 s, and was killed"}
    for name, said in reasons.items():
        found = read(tmp_path, name)
        assert (found["status"], found["reason"]) == ("failed", said)
        assert [row["value"] for row in found["rows"].values()] == [1]
    assert read(tmp_path, "broken")["reason"] == "ended with exit code 1"
    raising = read(tmp_path, "raising")
    assert raising["status"] == "failed" and "ZeroDivisionError" in raising["rows"]["wrong"]["error"]
    assert raising["rows"]["right"] == {"value": 2}
    assert (read(tmp_path, "going_on")["status"], list(read(tmp_path, "going_on")["rows"])) == ("unfinished", ["first"])

    # As another machine has it, where only the state arrives.
    other = tmp_path / "other"
    code, printed = call_forked(other, *own, "--only", "training", "--state", str(tmp_path / "state.tar"))
    assert code == 0, printed
    going_on = read(other, "going_on")
    assert (going_on["status"], list(going_on["rows"])) == ("done", ["first", "second"])
    assert [call["versions"].keys() >= {"torch"} for call in going_on["calls"]] == [True, True]
    assert "going_on: done before" in call_forked(other, *own, "--only", "going_on")[1]
    page = (other / "index.html").read_text()
    assert "a dry run" in page and "&lt;b&gt;" in page and "<td><b>" not in page


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    code, printed = call_forked(tmp_path, "--minutes", "0", "--only", "speed", "--page")
    assert code == 0, printed
    assert "cycle_mlp: not begun, the time is over" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_said(tmp_path: Path) -> None:
    code, printed = call_forked(tmp_path, "--device", "cuda")
    assert code == 1 and "--device: found cuda, but torch sees no GPU on this machine" in printed


def test_wheels_take_the_place_of_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "NEEDED", {"surely_missing": "surely_missing"})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit, match="found no wheel of surely_missing"):
        kit.install(tmp_path, tmp_path / "packages")
    with zipfile.ZipFile(tmp_path / "surely_missing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("surely_missing/__init__.py", "value = 3\n")
        about = "surely_missing-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: surely_missing\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    assert kit.install(tmp_path, tmp_path / "packages") == ["surely_missing-1.0-py3-none-any.whl"]
    assert __import__("surely_missing").value == 3
