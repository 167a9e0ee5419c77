"""Spans of several processes on one axis."""

import pytest

from mlotool.layerparallel.auxiliary.timeline import Timeline


def test_processes_that_began_at_different_times_share_an_axis() -> None:
    early = {"rank": 0, "batch": 0, "what": "forward", "begin": 0.5, "end": 1.0}
    late = {"rank": 1, "batch": 0, "what": "backward", "begin": 0.0, "end": 0.25}
    found = Timeline.joined([(100.0, [early]), (100.25, [late]), (7.0, [])])
    assert [span["rank"] for span in found] == [1, 0]
    assert found[0]["begin"] == pytest.approx(0.25)
    assert found[0]["end"] == pytest.approx(0.5)
    assert found[1] == early
    assert Timeline.joined([(1.0, [])]) == []
