"""Several runs of one process are runs like those of a process each."""

import functools
import itertools
import json
import pkgutil
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mlotool import config as configuration
from mlotool.config.composition import with_values
from mlotool.core.errors import RunError
from mlotool.core.loss_output import LossOutput
from mlotool.folders.safe_files import read_json
from mlotool.fusion.fused_ticks import FusedTicks, StackRecord
from mlotool.fusion.stacked_gradients import Verdict
from mlotool.fusion.stacked_schedule import Layout
from mlotool.losses import cross_entropy
from mlotool.runner import RunResult, run_config, together
from mlotool.runner.together import FusionRecord, RunRequest, run_together

WORDS = ["runner.max_ticks=4", "runner.report=false", "data.seed=0", "data.sizes.train=200", "logger=csv"]


@functools.cache
def composed() -> Any:
    return configuration.compose("plain", WORDS)


def request(folder: Path, *words: str, **settings: object) -> RunRequest:
    config = with_values(composed(), words)
    assert config is not None
    return RunRequest(config, folder, **settings)  # type: ignore[arg-type]


def run_all(requests: list[RunRequest], record: Path | None = None) -> dict[int, RunResult | BaseException]:
    """Run them together; return what became of them, in the order in which they ended."""
    ended: dict[int, RunResult | BaseException] = {}
    run_together(requests, record=record, when_ended=ended.__setitem__)
    return ended


def test_each_leaves_a_folder_and_is_told_of_but_for_those_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails does not end the others; one that fails while it begins has no place among them."""
    direct = run_config.build

    def failing(config: Any, *others: Any) -> Any:
        if config.seed == 9:
            raise RunError("no such file")
        return direct(config, *others)

    monkeypatch.setattr(run_config, "build", failing)
    words = [("seed=9",), ("seed=0",), ("problems.classifier.optimizer.lr=1e30",), ("seed=1",)]
    requests = [request(tmp_path / str(number), *changes) for number, changes in enumerate(words)]
    requests.append(request(tmp_path / "4", ended_at=4))
    ended = run_all(requests, tmp_path / "fusion" / "0.json")
    assert sorted(ended) == [0, 1, 2, 3] and not (tmp_path / "4").exists()
    assert isinstance(ended[0], RunError) and isinstance(ended[2], RunError)
    for number in (1, 3):
        result = ended[number]
        assert isinstance(result, RunResult) and result.output_dir == tmp_path / str(number)
        assert (tmp_path / str(number) / "summary.json").is_file()
    content = json.loads((tmp_path / "fusion" / "0.json").read_text())
    assert (content["waves"], [each["jobs"] for each in content["stacks"]]) == ([[1, 2, 3, 4]], [[1, 2, 3, 4]])


def signalling(direct: Any, counts: Any, at: int, times: int) -> Any:
    """Return a function that is interrupted, as by Ctrl-C, before or after its call number `at`."""

    @functools.wraps(direct)
    def function(*given: Any, **named: Any) -> Any:
        found = direct(*given, **named)
        if next(counts) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return found

    return function


def train(folder: Path, *words: str) -> None:
    """Run two in a folder, or go on there; whether they are one program is not a matter of time."""
    requests = []
    for seed in range(2):
        summary = read_json(folder / str(seed), "summary.json") or {}
        # An interrupted one has not ended.
        ended_at = summary["num_ticks"] if summary.get("status") == "finished" else None
        changes = f"seed={seed}", "runner.max_ticks=6", *words
        requests.append(request(folder / str(seed), *changes, resume="auto", ended_at=ended_at))
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlotool.fusion.stacked_gradients._fastest", lambda take, before: (before(), (0.0, take()))[1])
        run_all(requests, folder / "fusion" / "0.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


@pytest.mark.parametrize(
    ("place", "is_resumed", "times"),
    [("mlotool.runner.run_config.build", True, 1), ("mlotool.runner.run_config.write_inputs", False, 2)],
)
def test_an_interrupt_while_runs_begin(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, place: str, is_resumed: bool, times: int
) -> None:
    """Whatever a run had made of its folder, it goes on there, or begins anew, to the same bits."""
    parts = tmp_path / "parts"
    if is_resumed:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            direct, counts = FusedTicks.tick, itertools.count()
            patch.setattr("mlotool.runner.together.FusedTicks.tick", signalling(direct, counts, 3, 1))
            train(parts)
        ticks = [json.loads(each.read_text())["num_ticks"] for each in parts.glob("*/summary.json")]
        assert ticks == [4, 4]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        direct = pkgutil.resolve_name(place)
        patch.setattr(place, signalling(direct, itertools.count(), 1, times))
        train(parts)
    train(parts)
    for number in "01":
        assert (parts / number / "metrics.csv").read_bytes() == (whole / number / "metrics.csv").read_bytes()
        assert json.loads((parts / number / "summary.json").read_text())["status"] == "finished"


def test_those_that_find_no_memory_begin_when_the_others_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([True, False])
    monkeypatch.setattr("mlotool.runner.together.MemoryRoom.takes_one_more", lambda self: next(asked, True))
    requests = [request(tmp_path / str(seed), f"seed={seed}") for seed in range(4)]
    record = tmp_path / "fusion" / "0.json"
    ended = list(run_all(requests, record))
    content = json.loads(record.read_text())
    assert sorted(ended[:2]) == [0, 1] and sorted(ended[2:]) == [2, 3]
    assert content["waves"] == [[0, 1], [2, 3]]
    assert [each["jobs"] for each in content["stacks"]] == [[0, 1], [2, 3]]


def test_a_checkpoint_holds_one_run(tmp_path: Path, whole: Path) -> None:
    run_all([request(tmp_path / "alone")])
    folders = (whole / "0", whole / "1", tmp_path / "alone")
    sizes = [(folder / "checkpoints" / "last.ckpt").stat().st_size for folder in folders]
    assert max(sizes) < 1.02 * min(sizes)


def test_numpys_random_numbers_are_each_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = cross_entropy

    @functools.wraps(direct)
    def noisy(batch: Any, **roles: Any) -> Any:
        output = direct(batch, **roles)
        return LossOutput(output.loss * float(numpy.random.rand()), output.metrics)

    monkeypatch.setattr("mlotool.losses.cross_entropy", noisy)
    monkeypatch.setattr("mlotool.fusion.fused_ticks._has_foreign_code", lambda schedule: True)
    requests = [request(tmp_path / str(seed), f"seed={seed}") for seed in range(2)]
    run_all(requests)
    for number, each in enumerate(requests):
        run_all([replace(each, output_dir=tmp_path / f"alone{number}")])
        together, alone = ((tmp_path / name / "metrics.csv").read_text() for name in (str(number), f"alone{number}"))
        assert together == alone


JOBS = [3, 4, 7, 8]
FIRST = Verdict(is_fused=True, fused_s=0.5, alone_s=1.0, since_tick=1)
CHANGED = FIRST.changed(40, at_once=2).changed(90, is_fused=False, reason="a counter")
LAYOUT = Layout({"a": True, "b": False}, ("problems.a.loss.t",), {"a:0f": (True, False)})
RECORDS = [
    StackRecord((0, 1), {"a": CHANGED, "b+c": FIRST}, "", 0, {(0, 1): LAYOUT}),
    StackRecord((2, 3), {"a": FIRST}, "a shape has changed", 60, {(2, 3): Layout(), (3, 2): LAYOUT}),
]


def written(path: Path) -> dict[str, Any]:
    book = FusionRecord(path, JOBS)
    book.begin([0, 1])
    book.begin([2, 3])
    book.take(RECORDS)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def read(path: Path) -> tuple[list[StackRecord], list[int], list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        book = FusionRecord(path, JOBS)
    return book.stacks(), book.began_together([1, 2, 3]), [str(each.message) for each in told]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    content = written(path)
    assert read(path) == (RECORDS, [1], [])
    assert [each["jobs"] for each in content["stacks"]] == [[3, 4], [7, 8]]
    assert [each["until_tick"] for each in content["stacks"]] == [90, 60]
    assert [each["is_fused"] for each in content["stacks"]] == [True, False]
    assert content["stacks"][0]["reason"] == "a counter"
    content["new"] = content["stacks"][0]["new"] = content["stacks"][0]["rounds"]["a"]["new"] = 1
    path.write_text(json.dumps(content))
    assert read(path) == (RECORDS, [1], [])


OTHERS = '{"stacks": [{"jobs": [7, 9], "rounds": {}, "layouts": [], "apart": {"reason": "", "since_tick": 0}}]}'


@pytest.mark.parametrize("content", [OTHERS, '{"stacks": [{"jobs"', '{"stacks": [{"jobs": 3}]}', "[" * 100_000])
def test_what_is_no_record_of_these_jobs_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "3.json"
    path.write_text(content)
    stacks, began, [text] = read(path)
    assert (stacks, began) == ([], []) and "decided anew" in text


@pytest.mark.parametrize(
    ("free", "said"),
    [
        # A quarter stays free, and each run takes its memory twice: once to begin, and once to train.
        ([1000, 900, 450, 449], [True, False, False]),
        # The largest one counts, whatever came after it.
        ([1000, 800, 790, 660, 640], [True, True, True, False]),
        # Nothing is known.
        (["none", "none"], [True]),
    ],
)
def test_one_more_fits_after_the_largest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: list[Any], said: list[bool]
) -> None:
    path = tmp_path / "meminfo"

    def has(amount: Any) -> None:
        path.write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {amount} kB\nHugePages: 0\n")

    monkeypatch.setattr(together, "_MEMINFO", path)
    monkeypatch.setattr(together, "_GROUPS", ())
    has(free[0])
    room, found = together.MemoryRoom(torch.device("cpu")), []
    for amount in free[1:]:
        has(amount)
        found.append(room.takes_one_more())
    assert found == said
