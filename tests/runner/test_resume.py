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
from mlotool.runner import RunResult, checkpoint, run_config
from mlotool.runner.checkpoint import newest_first, read_checkpoint
from mlotool.runner.folder import RunFolder, run_lock
from tests.runner.algorithms import ALGORITHMS
from tests.runner.test_run_config import LossThat, press_ctrl_c, read_metrics, read_summary
from tests.runner.tiny import Built, make_built, make_config

Run = Callable[..., RunResult]

SHORT = {"runner.max_ticks": 10}


def test_a_run_goes_on_once_there_is_space_again(tiny_run: Run, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(tick: int, value: float) -> bool:
        # metrics.csv and summary.json still fit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000 if tick >= 20 else soft, hard))
        return False

    whole = tiny_run(folder="whole").output_dir
    parts = tmp_path / "run"
    try:
        with pytest.raises(WriteError, match=r"\.ckpt: cannot be written \(File too large\)"):
            tiny_run({"runner.checkpoint_seconds": 1e-9}, watch=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads((parts / "summary.json").read_text())["status"] == "failed"
    assert 0 < read_checkpoint(parts / "checkpoints/last.ckpt")["tick"] <= 20
    assert not list(parts.rglob("*.tmp"))
    tiny_run({"resume": str(parts)})
    assert (parts / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    ours, theirs = (read_checkpoint(each / "checkpoints/last.ckpt")["program"] for each in (parts, whole))
    for name, module in theirs["classifier"]["module"].items():
        assert torch.equal(ours["classifier"]["module"][name], module)


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
        RunFolder.create(make_config(), tmp_path / "run")
    (tmp_path / "run" / "artifacts").unlink()
    assert RunFolder.create(make_config(), tmp_path / "run").path == tmp_path / "run"


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
def test_a_wrong_checkpoint_is_refused_and_costs_nothing(tiny_run: Run, spoil: Any, text: str) -> None:
    folder = tiny_run(SHORT).output_dir
    (folder / "checkpoints/best.ckpt").unlink()
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


def test_the_best_checkpoint_serves_where_the_last_is_gone(tiny_run: Run) -> None:
    whole = tiny_run({"runner.max_ticks": 20}, folder="whole").output_dir
    folder = tiny_run(SHORT).output_dir
    (folder / "checkpoints/last.ckpt").unlink()
    tiny_run({"runner.max_ticks": 20, "resume": str(folder)})
    assert (folder / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()


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


@pytest.mark.filterwarnings("ignore:The Nystrom solve")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_resumes_bit_identically(
    go: Run, tmp_path: Path, at_every_tick: dict[str, Any], name: str
) -> None:
    build, changes = ALGORITHMS[name]
    dense = whole = go("dense", {**changes, **at_every_tick}, build=build).output_dir
    if name in ("unrolled", "early_stopping"):
        # Checkpoints change nothing.
        whole = go("whole", changes, build=build).output_dir
        assert_same(dense, whole)
    kept = sorted(int(path.stem.partition("_")[2]) for path in (dense / "checkpoints").glob("tick_*.ckpt"))
    assert kept == list(range(read_summary(whole)["num_ticks"] + 1))
    # Within an unroll, a window, a chunk and a round; the end of a round; once the start and the end of the run too.
    for tick in (0, 8, 13, 20, kept[-1]) if name == "unrolled" else (13, 20):
        parts = tmp_path / f"from_{tick}"
        shutil.copytree(dense, parts)
        # As a kill leaves it: with lines after the checkpoint, without an end.
        (parts / "summary.json").unlink()
        assert not go(None, changes, build=build, resume=parts / f"checkpoints/tick_{tick}.ckpt").had_finished
        assert_same(parts, whole)


def test_it_goes_on_from_the_best_checkpoint(go: Run, whole: Path) -> None:
    parts = go("parts").output_dir
    assert 0 < read_checkpoint(parts / "checkpoints/best.ckpt")["tick"] < 30
    (parts / "summary.json").unlink()
    go(None, resume=parts / "checkpoints/best.ckpt")
    assert_same(parts, whole)


@pytest.mark.parametrize(("tick", "signum"), [(2, signal.SIGINT), (10, signal.SIGTERM), (30, signal.SIGINT)])
def test_a_signal_leaves_a_checkpoint_at_its_tick(go: Run, whole: Path, tick: int, signum: int) -> None:
    def send(loss: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signum)
        return loss

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted) as caught:
        go("parts", build=lambda: make_built(LossThat(tick, send)))
    assert caught.value.exit_code == 128 + signum
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    parts = caught.value.run_dir
    assert parts is not None
    assert read_checkpoint(parts / "checkpoints/last.ckpt")["tick"] == tick
    assert read_summary(parts)["status"] == "interrupted"
    go(None, resume=parts)
    assert_same(parts, whole)


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


def test_a_chain_of_interruptions(go: Run, whole: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    for count in range(3):
        loss = LossThat(3, press_ctrl_c)
        with pytest.raises(Interrupted):
            go("parts", build=lambda loss=loss: make_built(loss), resume=None if count == 0 else parts)
        assert read_summary(parts)["num_ticks"] == 3 * (count + 1)
    go(None, resume=parts)
    assert_same(parts, whole)
    resumes = json.loads((parts / "provenance.json").read_text())["resumes"]
    assert [each["tick"] for each in resumes] == [3 * count for count in range(1, 4)]
    assert all(each["date"] and each["versions"]["torch"] == torch.__version__.split("+")[0] for each in resumes)


def test_a_torn_checkpoint_falls_back_to_the_one_before(go: Run, whole: Path, at_every_tick: dict[str, Any]) -> None:
    parts = interrupted(go, 25, at_every_tick)
    names = [path.name for path in newest_first(parts / "checkpoints")]
    assert names[:3] == ["last.ckpt", "tick_25.ckpt", "tick_24.ckpt"]
    assert (parts / "checkpoints/last.ckpt").samefile(parts / "checkpoints/tick_25.ckpt")
    truncate(parts / "checkpoints/last.ckpt")
    flip_a_byte(parts / "checkpoints/tick_24.ckpt")
    (parts / "checkpoints/.last.ckpt.123.tmp").write_bytes(b"torn")
    with pytest.warns(
        UserWarning, match=r"tick_24\.ckpt cannot be read \(BadZipFile: its part.*tick_23\.ckpt is taken"
    ):
        go(None, resume=parts)
    assert [each["tick"] for each in json.loads((parts / "provenance.json").read_text())["resumes"]] == [23]
    assert not list((parts / "checkpoints").glob(".*"))
    assert_same(parts, whole)


def interrupted(go: Run, tick: int, changes: dict[str, Any] | None = None, folder: str | None = "parts") -> Path:
    with pytest.raises(Interrupted) as caught:
        go(folder, changes, build=lambda: make_built(LossThat(tick, press_ctrl_c)))
    assert caught.value.run_dir is not None
    return caught.value.run_dir


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # In the middle of the largest tensor; torch itself would load it.
    state = torch.load(path, weights_only=True)["mlotool"]["random_states"][0]["torch"]
    content[content.index(state.numpy().tobytes()) + 99] ^= 1
    path.write_bytes(content)


def test_only_so_many_are_kept(go: Run, at_every_tick: dict[str, Any]) -> None:
    run_dir = go("run", {**at_every_tick, "runner.keep_checkpoints": 3}).output_dir
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "tick_28.ckpt", "tick_29.ckpt", "tick_30.ckpt"]


def test_a_run_without_a_checkpoint_begins_again(go: Run, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = interrupted(go, 5)
    (parts / "checkpoints/last.ckpt").unlink()
    (parts / "metrics.csv").write_text("tick,key,value\n")
    go(None, resume=parts)
    assert "has no checkpoint yet: it begins again" in capsys.readouterr().err
    assert_same(parts, whole)


def test_auto_takes_the_newest_unfinished_run_of_the_same_config(
    go: Run, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs/tiny/2020-01-01_00-00-00").mkdir(parents=True)
    first = interrupted(go, 5, folder=None)
    second = interrupted(go, 5, folder=None)
    other = interrupted(go, 5, {"seed": 1}, folder=None)
    capsys.readouterr()
    assert go(None, {"runner.progress_bar": False, "logger.project": "x"}, resume="auto").output_dir == second
    assert f"going on in {second} after tick 5 (last.ckpt)" in capsys.readouterr().err
    assert_same(second, whole)
    # The empty folder that Hydra makes is one of them.
    made = tmp_path / "outputs/tiny/2100-01-31_12-00-00"
    made.mkdir()
    assert go(str(made), resume="auto").output_dir.absolute() == first.absolute()
    assert_same(first, whole)
    capsys.readouterr()
    new = go(None, resume="auto").output_dir
    assert new not in (first, second, other)
    message = capsys.readouterr().err
    assert "no unfinished run with this config" in message
    assert "A new run begins" in message
    assert "seed: 1 there, 0 here" in message


def test_auto_with_a_folder_of_its_own_looks_nowhere_else(go: Run, tmp_path: Path) -> None:
    interrupted(go, 5, folder="other")
    own = go("own", resume="auto").output_dir
    assert own == tmp_path / "own"
    before = contents(own)
    assert go("own", resume="auto").had_finished
    assert contents(own) == before


@pytest.mark.parametrize("resume", ["auto", ".", "checkpoints/last.ckpt"])
def test_without_a_readable_checkpoint_nothing_is_written_over(go: Run, resume: str) -> None:
    parts = interrupted(go, 5, folder=None)
    truncate(parts / "checkpoints/last.ckpt")
    before = contents(parts)
    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be read .*; expected"):
        go(None, resume="auto" if resume == "auto" else parts / resume)
    assert contents(parts) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_stays_as_it_is(go: Run, capsys: pytest.CaptureFixture[str]) -> None:
    first = go("run")
    before = contents(first.output_dir)
    again = go(None, resume=first.output_dir)
    assert "has finished after 30 ticks; nothing is changed. Raise runner.max_ticks" in capsys.readouterr().err
    assert contents(first.output_dir) == before
    assert (again.metrics, again.objective) == (first.metrics, first.objective)
    assert again.had_finished


def test_more_ticks_go_on_with_a_finished_run(go: Run) -> None:
    whole = go("whole", {"runner.max_ticks": 50}).output_dir
    parts = go("parts", {"runner.max_ticks": 30}).output_dir
    go(None, {"runner.max_ticks": 50}, resume=parts)
    assert_same(parts, whole)
    with pytest.raises(ConfigError, match=r"runner\.max_ticks: found 20, while .* at tick 50; expected at least that"):
        (parts / "summary.json").unlink()
        go(None, {"runner.max_ticks": 20}, resume=parts)


def test_more_ticks_do_not_go_on_after_an_early_stop(go: Run) -> None:
    build, changes = ALGORITHMS["early_stopping"]
    parts = go("parts", changes, build=build).output_dir
    assert read_summary(parts)["num_ticks"] == 30
    assert go(None, {**changes, "runner.max_ticks": 300}, build=build, resume=parts).had_finished


def test_another_config_is_refused_by_its_keys(go: Run) -> None:
    parts = interrupted(go, 5)
    changes = {"seed": 3, "runner.log_every": 7, "evaluate.batch_size": 5, "runner.max_ticks": 90}
    with pytest.raises(ConfigError, match=r"another config in 3 key\(s\).*Give the keys the values") as caught:
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


def test_two_processes_never_write_one_folder(go: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mlotool.runner.folder.PATIENCE_S", 0.2)
    parts = interrupted(go, 5, folder=None)
    with run_lock(parts) as is_free:
        assert is_free
        with pytest.raises(ConfigError, match="another process is writing"):
            go(None, resume=parts)
        assert go(None, resume="auto").output_dir != parts
    assert go(None, resume=parts).output_dir == parts


def test_what_was_missing_from_the_metrics_is_said(go: Run) -> None:
    parts = interrupted(go, 25)
    (parts / "metrics.csv").write_text("tick,key,value\n")
    with pytest.warns(UserWarning, match=r"metrics\.csv has 15 bytes, while the checkpoint knows of \d+"):
        go(None, resume=parts)


def test_a_failed_run_goes_on_from_its_last_good_state(go: Run, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError):
        go("parts", build=lambda: make_built(LossThat(13, lambda loss: loss * float("nan"))))
    go(None, resume=tmp_path / "parts")
    assert_same(tmp_path / "parts", whole)
    assert len(read_metrics(whole)) == len(set(read_metrics(whole)))
