"""The benchmark of mixed-mode products, at sizes that take seconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.mixflow import ablation, measure, peaks, picture, toy
from benchmarks.mixflow.setting import WAYS, Setting, Sizes, Way

TINY = Sizes(num_layers=2, width=8, num_heads=2, vocabulary_size=8, length=6, batch_size=3)


def call(function: str, *arguments: Any) -> Any:
    """Do in this process what an engine does in its own."""
    return getattr(measure, function)(*arguments)


# Each kind with Adam, whose steps have a state, and one of each without.
SETTINGS = (*peaks.SETTINGS[:3], *peaks.SETTINGS[4::2])


# The gradients themselves are tested in tests/hypergradient.
@pytest.mark.parametrize(
    "setting",
    [SETTINGS[0], *(pytest.param(setting, marks=pytest.mark.slow) for setting in SETTINGS[1:])],
    ids=lambda setting: setting.title,
)
def test_all_ways_give_one_gradient(setting: Setting) -> None:
    assert max(peaks.differences(setting, call, None).values()) < 1e-12


def test_ways_that_differ_are_not_compared() -> None:
    def wrong(function: str, setting: Setting) -> np.ndarray:
        return np.full(3, 1.0 + setting.way.remat)

    with pytest.raises(SystemExit, match="The ways do different work"):
        peaks.differences(Setting(), wrong, None)


@pytest.mark.slow
def test_blocks_evaluated_again_take_less_at_depth_and_a_record_can_be_without_gradients() -> None:
    deep = Setting(sizes=TINY).sized(num_layers=6, length=16)
    memory = {way.name: measure.memory(deep.by(way)) for way in WAYS}
    for mode in ("reverse", "forward"):
        assert memory[f"{mode} + remat"].dynamic < memory[mode].dynamic / 2
    # The gradients of two steps are kept.
    assert memory["forward"].static - memory["reverse"].static > 4 * 2 * 6 * 12 * 8 * 8
    ways = (Way("forward", saves_gradients=flag) for flag in (True, False))
    kept, dropped = (measure.memory(Setting(sizes=TINY, way=way)).static for way in ways)
    # Steps that are looked at keep two numbers a parameter.
    assert dropped == pytest.approx(measure.memory(Setting(sizes=TINY)).static, rel=0.05) and dropped < 0.8 * kept


@pytest.mark.slow
def test_what_is_counted_is_what_the_allocator_says() -> None:
    counted, allocated = measure.counted_and_allocated(Setting(sizes=TINY).sized(length=64))
    assert 0.9 * allocated < counted <= 1.05 * allocated


def test_the_toy_by_hand_and_ours_agree_and_its_second_order_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # JAX takes seconds to compile.
    monkeypatch.setattr(toy, "_has_jax", lambda: False)
    found = toy.measure((1,), is_small=True)
    assert max(found["difference"].values()) < 1e-10
    exact, without_steps = (
        toy._by_hand(toy.Toy(**{**toy.CHECKED, "rate": rate}), is_checkpointed=False)() for rate in (0.1, 0.0)
    )
    assert float((exact - without_steps).norm() / exact.norm()) > 0.1


def test_the_ablation_has_the_rows_of_the_paper() -> None:
    assert [name for name, _ in ablation.ways()] == list(ablation.PAPER)
    assert len({way for _, way in ablation.ways()}) == 8
    found = ablation.row_of(ablation.TINY, is_timed=False)
    assert found["peak"] == found["static"] + found["dynamic"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    memory = {way.name: {"dynamic": 2**20} for way in WAYS}
    rows = [{"title": title, "num_layers": depth, "memory": memory} for title in picture.TITLES for depth in (4, 8)]
    (tmp_path / "found.json").write_text(json.dumps({"rows": rows}))
    assert picture.draw(tmp_path / "found.json", tmp_path / "found.png").stat().st_size > 1000
