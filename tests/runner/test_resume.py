"""Going on from a checkpoint gives the run that was never interrupted; a full disk or a wrong file costs nothing."""

import functools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool.runner
from mlotool.core.errors import CheckpointError, ConfigError, Interrupted, NonFiniteLossError, WriteError
from mlotool.folders.run_folder import RunFolder
from mlotool.runner import RunResult, checkpoint, run_config
from mlotool.runner.checkpoint import newest_first, read_checkpoint
from tests.runner.algorithms import ALGORITHMS
from tests.runner.test_run_config import LossThat, press_ctrl_c, read_metrics, read_summary
from tests.runner.tiny import Built, make_built, make_config

Run = Callable[..., RunResult]

LIKE_OTHERS = ("nystrom", "unrolled_within_a_horizon")
"""Of `ALGORITHMS`: what keeps the same state between ticks as another one."""


def test_a_run_goes_on_once_there_is_space_again(tiny_run: Run, whole: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(tick: int, value: float) -> bool:
        # metrics.csv and summary.json still fit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000 if tick >= 20 else soft, hard))
        return False

    parts = tmp_path / "run"
    try:
        with pytest.raises(WriteError, match=r"\.ckpt: cannot be written \(File too large\)"):
            tiny_run({"runner.checkpoint_seconds": 1e-9}, watch=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads((parts / "summary.json").read_text())["status"] == "failed"
    assert 0 < read_checkpoint(parts / "checkpoints/last.ckpt")["tick"] < 20
    assert not list(parts.rglob("*.tmp"))
    tiny_run({"resume": str(parts)})
    assert (parts / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    seen = [
        RunFolder(folder).arrays("artifacts/outputs_weights.output.npz", ("tick", "count"), ())
        for folder in (parts, whole)
    ]
    assert len(seen[0]["tick"]) == 4 and all((seen[0][key] == seen[1][key]).all() for key in seen[0])
    ours, theirs = (read_checkpoint(each / "checkpoints/last.ckpt")["program"] for each in (parts, whole))
    assert_equal(ours["classifier"]["module"], theirs["classifier"]["module"], "module")


def test_a_folder_that_vanishes_ends_the_run_in_one_sentence(tiny_run: Run, tmp_path: Path) -> None:
    """Warnings are errors here: there is nothing beside it."""
    with pytest.raises(
        WriteError, match=r"run.*: cannot be written \(No such file.*expected the folder that was there"
    ):
        tiny_run(watch=lambda tick, value: bool(shutil.rmtree(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_could_not_be_taken_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "artifacts").write_text("a file")
    with pytest.raises(WriteError, match=r"run/artifacts: cannot be written \(File exists\)"):
        RunFolder.create("tiny", tmp_path / "run")
    (tmp_path / "run" / "artifacts").unlink()
    assert RunFolder.create("tiny", tmp_path / "run").path == tmp_path / "run"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            ("program", "classifier", "optimizer"),
            r"last\.ckpt does not fit the problems of its .* \(state\.classifier: found \{module",
        ),
        (("window",), r"found no checkpoint in .* that can be read: .*last\.ckpt .* has no 'mlotool\.window'"),
        (None, r"found no checkpoint in .*, while metrics\.csv has values; expected the checkpoints that the run"),
    ],
)
def test_a_wrong_checkpoint_is_refused_and_costs_nothing(tiny_run: Run, parts: Path, spoil: Any, text: str) -> None:
    folder = parts
    last = folder / "checkpoints/last.ckpt"
    if spoil is None:
        last.unlink()
    else:
        content = torch.load(last, weights_only=True)
        *path, lost = spoil
        del functools.reduce(dict.__getitem__, path, content["mlotool"])[lost]
        torch.save(content, last)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match=text):
        tiny_run({"runner.max_ticks": 20, "resume": str(folder)})
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ConfigError if spoil is None else CheckpointError, match=r"last"):
        mlotool.runner.load(folder, "classifier", "last")


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run in tmp_path/<folder>, or go on with what `resume` says."""
    monkeypatch.chdir(tmp_path)

    def run(
        folder: str | None = "run",
        changes: dict[str, Any] | None = None,
        *,
        resume: str | Path | None = None,
        build: Callable[[], Built] = make_built,
    ) -> RunResult:
        monkeypatch.setattr(run_config, "build", lambda config, reduce, shared: build())
        # What a process of its own would not have.
        torch.manual_seed(12345)
        output_dir = None if folder is None else tmp_path / folder
        return mlotool.runner.run(make_config(**(changes or {})), output_dir=output_dir, resume=resume)

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_config, "build", lambda config, reduce, shared: make_built())
        return mlotool.runner.run(make_config(), output_dir=tmp_path_factory.mktemp("runs") / "whole").output_dir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after tick 5."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(run_config, "build", lambda *_: make_built(LossThat(5, press_ctrl_c)))
        mlotool.runner.run(make_config(), output_dir=folder)
    return folder


@pytest.fixture
def parts(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it, where runs have their folders."""
    return Path(shutil.copytree(stopped, tmp_path / "outputs/tiny/2026-01-31_12-00-00"))


@pytest.fixture
def at_every_tick(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make checkpoints at every tick affordable; return the settings that ask for them, and keep them all."""
    monkeypatch.setattr(checkpoint, "LARGEST_SHARE_OF_TIME", float("inf"))
    return {"runner.checkpoint_seconds": 1e-9, "runner.keep_checkpoints": 1000}


def assert_same(found: Path, expected: Path) -> None:
    assert (found / "metrics.csv").read_bytes() == (expected / "metrics.csv").read_bytes()
    for name in ("last.ckpt", "best.ckpt"):
        assert (found / "checkpoints" / name).exists() == (expected / "checkpoints" / name).exists()
        if (expected / "checkpoints" / name).exists():
            a, b = (read_checkpoint(each / "checkpoints" / name) for each in (found, expected))
            for state in (a, b):
                del state["training_s"]
            assert_equal(a, b, name)
    a, b = read_summary(found), read_summary(expected)
    assert a.pop("training_s") > 0 < b.pop("training_s")
    assert a == b


def assert_equal(a: Any, b: Any, path: str) -> None:
    """Compare two states to the last bit."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, other, f"{path}[{index}]")
    else:
        assert a == b or a != a, path


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:The Nystrom solve")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in ALGORITHMS]
)
def test_every_algorithm_resumes_bit_identically(
    go: Run, tmp_path: Path, at_every_tick: dict[str, Any], name: str
) -> None:
    build, changes = ALGORITHMS[name]
    changes = {"runner.max_ticks": 11, "runner.ticks_per_chunk": 4, "evaluate.splits.val": 5, **changes}
    dense = whole = go("dense", {**changes, **at_every_tick}, build=build).output_dir
    if name in ("unrolled", "early_stopping"):
        # Checkpoints change nothing.
        whole = go("whole", changes, build=build).output_dir
        assert_same(dense, whole)
    kept = sorted(int(path.stem.partition("_")[2]) for path in (dense / "checkpoints").glob("tick_*.ckpt"))
    assert kept == list(range(read_summary(whole)["num_ticks"] + 1))
    # Within an unroll, a window, a chunk and a round; by some, the start, the end of a round and that of the run too.
    for tick in {"unrolled": (0, 4, 7, 10, kept[-1]), "plateau": (7, 10)}.get(name, (7,)):
        parts = tmp_path / f"from_{tick}"
        shutil.copytree(dense, parts)
        # As a kill leaves it: with lines after the checkpoint, without an end.
        (parts / "summary.json").unlink()
        assert not go(None, changes, build=build, resume=parts / f"checkpoints/tick_{tick}.ckpt").had_finished
        assert_same(parts, whole)


def test_it_goes_on_from_the_best_checkpoint(go: Run, tmp_path: Path) -> None:
    """Where it is named, and where the last one is gone."""
    changes = {"evaluate.splits.val": 5}
    whole = go("whole", changes).output_dir
    for is_named in (True, False):
        parts = Path(shutil.copytree(whole, tmp_path / str(is_named)))
        best = parts / "checkpoints/best.ckpt"
        assert 0 < read_checkpoint(best)["tick"] < 20
        (parts / ("summary.json" if is_named else "checkpoints/last.ckpt")).unlink()
        (parts / "summary.json").unlink(missing_ok=True)
        go(None, changes, resume=best if is_named else parts)
        assert_same(parts, whole)


def test_both_checkpoints_are_there_where_it_was_killed_between_them(go: Run, whole: Path, tmp_path: Path) -> None:
    parts = Path(shutil.copytree(whole, tmp_path / "parts"))
    assert read_checkpoint(parts / "checkpoints/best.ckpt")["tick"] == 20
    for name in ("checkpoints/last.ckpt", "summary.json"):
        (parts / name).unlink()
    go(None, resume=parts)
    assert_same(parts, whole)


def test_a_chain_of_signals_leaves_checkpoints_at_their_ticks(go: Run, whole: Path, tmp_path: Path) -> None:
    parts, ticks = tmp_path / "parts", [0]
    for num_steps, number in ((2, signal.SIGINT), (8, signal.SIGTERM), (10, signal.SIGINT)):
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        loss = LossThat(num_steps, functools.partial(press_ctrl_c, number=number))
        with pytest.raises(Interrupted) as caught:
            go("parts", build=lambda loss=loss: make_built(loss), resume=parts if parts.exists() else None)
        assert (caught.value.exit_code, caught.value.run_dir) == (128 + number, parts)
        assert str(caught.value).startswith(f"interrupted; the run is in {parts}. ")
        assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        ticks.append(ticks[-1] + num_steps)
        summary, state = read_summary(parts), read_checkpoint(parts / "checkpoints/last.ckpt")
        assert (summary["status"], summary["num_ticks"], state["tick"]) == ("interrupted", ticks[-1], ticks[-1])
    go(None, resume=parts)
    assert_same(parts, whole)
    resumes = json.loads((parts / "provenance.json").read_text())["resumes"]
    assert [each["tick"] for each in resumes] == ticks[1:]
    assert all(each["date"] and each["versions"]["torch"] == torch.__version__.split("+")[0] for each in resumes)


def test_a_signal_during_an_evaluation_ends_the_round_first(
    go: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = mlotool.runner.evaluation.Evaluator.evaluate

    def evaluate_and_stop(self: Any, split: str, *model: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, split, *model)

    monkeypatch.setattr(mlotool.runner.evaluation.Evaluator, "evaluate", evaluate_and_stop)
    with pytest.raises(Interrupted):
        go("parts")
    monkeypatch.undo()
    parts = tmp_path / "parts"
    state = read_checkpoint(parts / "checkpoints/last.ckpt")
    assert (state["tick"], state["is_pending"]) == (10, False)
    monkeypatch.chdir(parts.parent)
    go(None, resume=parts)
    assert_same(parts, whole)


def test_a_torn_checkpoint_falls_back_to_the_one_before(
    go: Run, whole: Path, tmp_path: Path, at_every_tick: dict[str, Any]
) -> None:
    with pytest.raises(Interrupted):
        go("parts", at_every_tick, build=lambda: make_built(LossThat(15, press_ctrl_c)))
    parts = tmp_path / "parts"
    names = [path.name for path in newest_first(parts / "checkpoints")]
    assert names[:3] == ["last.ckpt", "tick_15.ckpt", "tick_14.ckpt"]
    assert (parts / "checkpoints/last.ckpt").samefile(parts / "checkpoints/tick_15.ckpt")
    truncate(parts / "checkpoints/last.ckpt")
    flip_a_byte(parts / "checkpoints/tick_14.ckpt")
    (parts / "checkpoints/.last.ckpt.123.tmp").write_bytes(b"torn")
    with pytest.warns(
        UserWarning, match=r"tick_14\.ckpt cannot be read \(BadZipFile: its part.*tick_13\.ckpt is used instead"
    ):
        go(None, resume=parts)
    assert [each["tick"] for each in json.loads((parts / "provenance.json").read_text())["resumes"]] == [13]
    assert not list((parts / "checkpoints").glob(".*"))
    assert_same(parts, whole)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # In the middle of the largest tensor; torch itself would load it.
    state = torch.load(path, weights_only=True)["mlotool"]["random_states"][0]["torch"]
    content[content.index(state.numpy().tobytes()) + 99] ^= 1
    path.write_bytes(content)


def test_only_so_many_are_kept(go: Run, at_every_tick: dict[str, Any]) -> None:
    run_dir = go("run", {**at_every_tick, "runner.keep_checkpoints": 3, "runner.max_ticks": 12}).output_dir
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "tick_10.ckpt", "tick_11.ckpt", "tick_12.ckpt"]


def test_a_run_without_a_checkpoint_begins_again(
    go: Run, whole: Path, parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (parts / "checkpoints/last.ckpt").unlink()
    (parts / "metrics.csv").write_text("tick,key,value\n")
    go(None, resume=parts)
    assert "has no checkpoint yet: it begins again" in capsys.readouterr().err
    assert_same(parts, whole)


def test_auto_takes_the_newest_unfinished_run_of_the_same_config(
    go: Run, whole: Path, tmp_path: Path, parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (parts.parent / "2020-01-01_00-00-00").mkdir()
    newer, other = (Path(shutil.copytree(parts, parts.with_name(f"2026-01-31_12-00-0{each}"))) for each in (1, 2))
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    changed = {"runner.progress_bar": False, "runner.trainer.profiler": "simple", "logger.project": "x"}
    found = go(None, changed, resume="auto").output_dir
    assert found.absolute() == newer
    assert f"going on in {found} after tick 5 (last.ckpt)" in capsys.readouterr().err
    assert_same(newer, whole)
    # The empty folder that Hydra makes is one of them.
    made = tmp_path / "outputs/tiny/2100-01-31_12-00-00"
    made.mkdir()
    assert go(str(made), resume="auto").output_dir.absolute() == parts
    assert_same(parts, whole)
    capsys.readouterr()
    assert go(None, resume="auto").output_dir.absolute() not in (parts, newer, other)
    message = capsys.readouterr().err
    for part in ("no unfinished run with this config", "A new run begins", "seed: 1 there, 0 here"):
        assert part in message


def test_auto_with_a_folder_of_its_own_looks_nowhere_else(go: Run, parts: Path, tmp_path: Path) -> None:
    own = go("own", resume="auto").output_dir
    assert own == tmp_path / "own"
    before = contents(own)
    assert go("own", resume="auto").had_finished
    assert contents(own) == before


@pytest.mark.parametrize("resume", ["auto", ".", "checkpoints/last.ckpt"])
def test_without_a_readable_checkpoint_nothing_is_written_over(go: Run, parts: Path, resume: str) -> None:
    truncate(parts / "checkpoints/last.ckpt")
    before = contents(parts)
    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be read .*; expected"):
        go(None, resume="auto" if resume == "auto" else parts / resume)
    assert contents(parts) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_stays_as_it_is_until_it_gets_more_ticks(
    go: Run, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = Path(shutil.copytree(whole, tmp_path / "parts"))
    before = contents(parts)
    again, summary = go(None, resume=parts), read_summary(whole)
    assert "has finished after 20 ticks; nothing is changed. Raise runner.max_ticks" in capsys.readouterr().err
    assert contents(parts) == before
    assert (again.metrics, again.objective) == (summary["metrics"], summary["objective"]["value"])
    assert again.had_finished
    longer = go("longer", {"runner.max_ticks": 30}).output_dir
    go(None, {"runner.max_ticks": 30}, resume=parts)
    assert_same(parts, longer)
    with pytest.raises(ConfigError, match=r"runner\.max_ticks: found 20, while .* at tick 30; expected at least that"):
        (parts / "summary.json").unlink()
        go(None, {"runner.max_ticks": 20}, resume=parts)


def test_more_ticks_do_not_go_on_after_an_early_stop(go: Run) -> None:
    build, changes = ALGORITHMS["early_stopping"]
    parts = go("parts", changes, build=build).output_dir
    assert read_summary(parts)["num_ticks"] == 30
    assert go(None, {**changes, "runner.max_ticks": 300}, build=build, resume=parts).had_finished


def test_another_config_is_refused_by_its_keys(go: Run, parts: Path) -> None:
    changes = {"seed": 3, "runner.log_every": 7, "evaluate.batch_size": 5, "runner.max_ticks": 90}
    with pytest.raises(ConfigError, match=r"another config in 3 key\(s\).*Set the keys to the values") as caught:
        go(None, changes, resume=parts)
    for difference in ("seed: 0 there, 3 here", "runner.log_every: 5 there, 7 here", "evaluate.batch_size: 7 there, 5"):
        assert difference in str(caught.value)
    assert "max_ticks:" not in str(caught.value)


@pytest.mark.parametrize(
    ("resume", "match"),
    [
        ("auot", r"found 'auot', which does not exist; expected auto.*Did you mean 'auto'"),
        (".", "has no config.yaml"),
        ("file.ckpt", "is in no run folder"),
    ],
)
def test_what_is_no_run_is_refused(go: Run, tmp_path: Path, resume: str, match: str) -> None:
    (tmp_path / "file.ckpt").touch()
    with pytest.raises(ConfigError, match=match):
        go(None, resume=resume)


def test_two_processes_never_write_one_folder(go: Run, parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.runner.resume.PATIENCE_S", 0.2)
    with RunFolder(parts).lock() as is_free:
        assert is_free
        with pytest.raises(ConfigError, match="another process is writing"):
            go(None, resume=parts)
        assert go(None, resume="auto").output_dir.absolute() != parts
    (parts / "metrics.csv").write_text("tick,key,value\n")
    with pytest.warns(UserWarning, match=r"metrics\.csv has 15 bytes, but had \d+"):
        assert go(None, resume=parts).output_dir == parts


def test_a_failed_run_goes_on_from_its_last_good_state(go: Run, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError):
        go("parts", build=lambda: make_built(LossThat(13, lambda loss: loss * float("nan"))))
    go(None, resume=tmp_path / "parts")
    assert_same(tmp_path / "parts", whole)
    assert len(read_metrics(whole)) == len(set(read_metrics(whole)))
