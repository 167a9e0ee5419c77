"""`resume=` as it is typed: exit codes, the line that says how to go on, and one-shot searches that are killed."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests import forked
from tests.cli.conftest import Call, Recipe
from tests.cli.test_sweep import begin, wait_until
from tests.runner.test_resume import assert_same

WORDS = ["+recipe=mwn", "logger=csv", "debug=fast", "runner.progress_bar=false", "runner.report=false"]


def test_a_run_goes_on_and_hydras_empty_folder_goes(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", *WORDS, "debug.limit_ticks=2", "resume=auto")
    assert (code, "A new run begins" in err) == (0, True)
    [folder] = (tmp_path / "outputs/mwn").iterdir()
    assert "resume=" not in (folder / "overrides.txt").read_text()
    code, out, err = call("run", *WORDS, "debug.limit_ticks=4", "resume=auto")
    assert (code, "after tick 2" in err, folder.name in out) == (0, True, True)
    assert list((tmp_path / "outputs/mwn").iterdir()) == [folder]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = call("run", *WORDS, "debug.limit_ticks=4", f"resume={folder}")
    assert (code, "nothing is changed" in err, folder.name in out) == (0, True, True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert call("run", *WORDS, "seed=7", f"resume={folder}")[0] == 2
    code, _, err = call("run", *WORDS, "resum=auto")
    assert (code, "resume" in err) == (2, True)


def test_a_recipe_cannot_resume(call: Call, recipe: Recipe) -> None:
    code, _, err = call("run", str(recipe("resume: /somewhere")))
    assert code == 2 and "found the key 'resume'; expected it on the command line alone" in err


@pytest.mark.slow
def test_sigterm_and_what_it_says_to_type(tmp_path: Path) -> None:
    words, folder = ["run", *WORDS, "debug=off", "runner.max_ticks=150"], "outputs/mwn/*"
    process = begin(words, tmp_path)
    wait_until(process, lambda: any(tmp_path.glob(f"{folder}/checkpoints/last.ckpt")))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    said = (tmp_path / "errors.txt").read_text().splitlines()
    [line] = [line for line in said if line.startswith("mlotool: go on with: mlotool run ")]
    assert begin([*words, line.split()[-1]], tmp_path).wait() == 0
    [resumed] = tmp_path.glob(folder)
    assert begin([*words, "hydra.run.dir=whole"], tmp_path).wait() == 0
    assert (resumed / "metrics.csv").read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()


NUM_KILLS = 5
SHARED = ["+recipe=explore_enas", "data.sizes={train: 100, meta: 100, val: 100, test: 100}", "runner.max_ticks=40",
          "runner.checkpoint_seconds=1e-9", "runner.report=false", "logger=csv", "runner.progress_bar=false",
          "evaluate.splits.val=6", "resume=auto"]  # fmt: skip


def written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


@pytest.mark.slow
def test_a_one_shot_search_that_is_killed(tmp_path: Path) -> None:
    def search(name: str) -> forked.Forked:
        return forked.command("run", *SHARED, f"hydra.run.dir={name}", folder=tmp_path)

    assert search("whole").wait() == 0
    chance, last = random.Random(0), tmp_path / "killed" / "checkpoints" / "last.ckpt"
    for _ in range(NUM_KILLS):
        before, process = written(last), search("killed")
        # Until it trains.
        wait_until(process, lambda before=before: written(last) != before)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert search("killed").wait() == 0
    assert_same(tmp_path / "killed", tmp_path / "whole")
    texts = {(tmp_path / name / "artifacts/search_decisions.txt").read_text() for name in ("killed", "whole")}
    assert len(texts) == 1
