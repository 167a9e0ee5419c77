from typing import Any

from mlotool.layerparallel.auxiliary.timeline import Timeline


def span(rank: int, batch: int, begin: float, end: float) -> dict[str, Any]:
    return {"rank": rank, "batch": batch, "what": "forward", "begin": begin, "end": end}


def test_spans_of_several_processes_begin_at_the_first_one() -> None:
    found = Timeline.joined([[span(0, 0, 7.0, 8.0), span(0, 1, 9.0, 9.5)], [span(1, 0, 7.5, 9.0)]])
    assert found == [span(0, 0, 0.0, 1.0), span(1, 0, 0.5, 2.0), span(0, 1, 2.0, 2.5)]
    assert Timeline.joined([[], []]) == []
