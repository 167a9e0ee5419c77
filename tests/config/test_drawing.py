"""Which sweeps draw decisions."""

from pathlib import Path

from mlotool.config.drawing import Drawer
from mlotool.config.sweep_plan import Dimension
from tests.sweep.plans import make_plan


def test_a_sweep_without_spaces_draws_none(tmp_path: Path) -> None:
    assert not Drawer(make_plan(tmp_path, Dimension("seed", ("0", "1")))).is_needed


def test_a_first_choice_that_is_wrong_refuses_no_sweep(tmp_path: Path) -> None:
    wrong = Dimension("problems.classifier.stream.batch_size", ("-1", "10"))
    assert not Drawer(make_plan(tmp_path, wrong)).is_needed
