"""What the command line says, and leaves, where the disk or a signal comes in between."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlotool.cli import job
from mlotool.core.errors import WriteError
from mlotool.folders import files
from tests.cli.conftest import Call
from tests.report.run_folders import write_job, write_metrics

WORDS = ("run", "plain", "runner.accelerator=cpu", "logger.wandb=false", "runner.progress_bar=false")
SHORT = ("runner.max_ticks=2", "hydra.run.dir=run")


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Send this process a signal while a file of a name is written, the first time: `send("report.html", 15)`."""

    def at(name: str, number: int) -> None:
        replacing, sent = files.replacing, list[str]()

        @contextmanager
        def interrupted(path: Path, **settings: Any) -> Iterator[Path]:
            with replacing(path, **settings) as temporary:
                yield temporary
                if path.name == name and not sent:
                    sent.append(name)
                    os.kill(os.getpid(), number)

        monkeypatch.setattr(files, "replacing", interrupted)

    return at


@pytest.mark.parametrize(
    ("file", "number", "code"), [("report.html", signal.SIGTERM, 143), ("evaluation-loss.svg", signal.SIGINT, 130)]
)
def test_a_signal_while_a_page_is_written_leaves_the_old_one(
    call: Call, send: Callable[[str, int], None], tmp_path: Path, file: str, number: int, code: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_metrics(run, [(tick, "val/loss", 1 / tick) for tick in (1, 2, 3)])
    (run / "report.html").write_text("the old page")
    send(file, number)
    assert call("report", "run") == (code, "", "mlotool: interrupted.\n")
    assert (run / "report.html").read_text() == "the old page" and not list(run.rglob("*.tmp"))
    assert call("report", "run")[0] == 0
    assert (run / "report.html").read_text().endswith("</html>\n")


@pytest.mark.usefixtures("pages")
def test_a_run_that_has_ended_says_so_where_its_page_is_interrupted(
    call: Call, send: Callable[[str, int], None], tmp_path: Path
) -> None:
    send("report.html", signal.SIGTERM)
    code, _, err = call(*WORDS, *SHORT)
    assert code == 143
    assert "the run has ended, but its report was not written. Write it with: mlotool report run\n" in err
    assert '"status": "finished"' in (tmp_path / "run/summary.json").read_text()
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_table_that_cannot_be_written_is_shown_all_the_same(call: Call, tmp_path: Path) -> None:
    for number, value in enumerate((0.5, 0.4)):
        write_job(tmp_path / "sweep" / str(number), f"lr={value}", value=value)
    (tmp_path / "sweep" / "multirun.yaml").write_text("{}\n")
    (tmp_path / "sweep" / "sweep.csv").mkdir()
    code, out, err = call("report", "sweep")
    assert code == 1 and "finished, best" in out and "sweep page   sweep/sweep.html" in out
    assert "the table could not be written" in err and "(Is a directory); expected a place for it" in err


def test_a_job_whose_failure_cannot_be_written_does_not_end_the_sweep(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr(job, "train", refuse)
    monkeypatch.setattr(job, "note_failure", refuse)
    code, out, err = call(*WORDS, "-m", "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 1 and err.count("failed: the disk is full") == 2
    assert "Error executing job" not in out + err
