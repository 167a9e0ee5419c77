import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlotool.folders.run_folder import RunFolder
from mlotool.report import write_report
from mlotool.report.layer_parallel import read_timelines
from tests.report.html_check import read_page
from tests.report.run_folders import mwn_config, problem, write_run

# What a rank does in a batch of one second: word, begin, end.
WORK = {
    0: [("auxnet", 0.0, 0.1), ("forward", 0.1, 0.3), ("backward", 0.3, 0.7), ("communication", 0.7, 0.72)],
    1: [("communication", 0.0, 0.1), ("forward", 0.1, 0.3), ("backward", 0.35, 0.8), ("auxnet", 0.8, 1.0)],
}


def spans(num_batches: int = 4) -> list[dict[str, Any]]:
    """Batches of WORK; the first one takes ten times as long."""
    found = []
    for batch in range(num_batches):
        start, scale = (0.0, 10.0) if batch == 0 else (9.0 + batch, 1.0)
        for rank, work in WORK.items():
            for what, begin, end in work:
                times = {"begin": start + scale * begin, "end": start + scale * end}
                found.append({"rank": rank, "batch": batch, "what": what, **times})
    return found


def write_parallel_run(folder: Path, rows: Sequence[tuple[int, str, float]] = (), **content: Any) -> Path:
    run = write_run(folder, rows=rows)
    for name, text in content.items():
        (run / "artifacts" / f"{name}.json").write_text(json.dumps(text))
    return run


def test_the_page_of_a_layer_parallel_run(tmp_path: Path) -> None:
    rows = [(tick, "classifier/loss", 2.0 / tick) for tick in range(1, 60)]
    for interface in (1, 2):
        rows += [(tick, f"classifier/violation_{interface}", interface * 0.8**tick) for tick in range(1, 60)]
        rows += [(tick, f"classifier/relative_violation_{interface}", 0.1 / tick) for tick in range(1, 60)]
    content = {"stages": 2, "processes": 2, "spans": spans()}
    run = write_parallel_run(tmp_path / "run", rows, parallel_classifier=content)
    page = read_page(write_report(run))
    for text in (
        *("Layer-parallel training", "classifier: what each rank did when", "Batches 1 to 3 of the first 4"),
        *("classifier: speed-up", "2 ranks, no overhead", "1.25", "1.52", "2.00", "auxiliary 200 ms on the busiest"),
        *("classifier: constraint violation", "interface 2"),
        "classifier: relative constraint violation",
    ):
        assert text in page.text, text
    assert "Training: violation" not in page.text and "one after the other, in one process" not in page.text
    drawn = {file.stem for file in (run / "report").iterdir()}
    assert {"timeline-classifier", "speedup-classifier", "classifier-violation"} <= drawn


def test_one_stage_and_one_batch_have_a_timeline_too(tmp_path: Path) -> None:
    alone = [span for span in spans(num_batches=1) if span["rank"] == 0]
    run = write_parallel_run(tmp_path / "run", parallel_classifier={"stages": 1, "spans": alone})
    page = read_page(write_report(run))
    assert "what each rank did when" in page.text and "speed-up" not in page.text
    run = write_parallel_run(tmp_path / "one", parallel_net={"stages": 2, "processes": 1, "spans": spans()})
    assert "The stages ran one after the other, in one process" in read_page(write_report(run)).text


SPAN = {"rank": 0, "batch": 0, "what": "forward", "end": 1}
WRONG = [[], *({"stages": num, "spans": some} for num, some in (
    (2, []), (1, spans()), (10**9, spans()), (2, [{**SPAN, "begin": 1}]), (2, [{**SPAN, "begin": 2}]),
))]  # fmt: skip


def test_what_cannot_be_drawn_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    for content in WRONG:
        (tmp_path / "artifacts/parallel_net.json").write_text(json.dumps(content))
        timelines, [note] = read_timelines(RunFolder(tmp_path))
        assert not timelines and "artifacts/parallel_net.json could not be drawn" in note


def test_residuals_are_drawn_together(tmp_path: Path) -> None:
    rows = [(tick, f"net/forward_residual_{cycle}", tick * 0.1**cycle) for tick in (1, 2, 3) for cycle in range(4)]
    rows += [(1, "net/middle.backward_residual_0", 0.0), (1, "net/middle.backward_residual_1", float("nan"))]
    config = mwn_config() | {"problems": {"net": problem("MLP", 0.1)}}
    page = read_page(write_report(write_run(tmp_path / "run", config=config, rows=rows)))
    for text in ("net: residual of multigrid, states", "cycle 3", "net, middle: residual of multigrid, adjoints",
                 "net: residual of multigrid, states, by cycle", "One line a logged tick",
                 "cycle 0: 0 at tick 1. cycle 1: 1 value was not finite"):  # fmt: skip
        assert text in page.text, text
    assert "Training: forward" not in page.text
