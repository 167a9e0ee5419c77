import json
import sys
from pathlib import Path

import pytest

from benchmarks import framework_tax


@pytest.mark.slow
def test_its_rivals_do_the_same_arithmetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What is timed may be short; what is compared is not.
    monkeypatch.setattr(framework_tax, "TICKS_A_TURN", 10)
    output = tmp_path / "tax.json"
    monkeypatch.setattr(sys, "argv", ["framework_tax", "--rounds", "2", "--ticks", "10", "--output", str(output)])
    framework_tax.main()
    found = json.loads(output.read_text())
    assert found["difference"].keys() == found["against_bare_loop"]["cpu"].keys()
    assert max(found["difference"].values()) < framework_tax.LARGEST_DIFFERENCE
