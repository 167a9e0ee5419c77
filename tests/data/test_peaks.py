"""Points of the peaks function."""

from math import exp

import numpy as np
import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.data import Peaks
from mlotool.data.peaks import HIGHEST, LOWEST, level, peaks


def test_the_function_is_matlabs() -> None:
    # Of its manual's formula, by hand at points where terms drop out.
    at_origin = 3 * exp(-1) - exp(-1) / 3
    at_one = -10 * (1 / 5 - 1) * exp(-1) - exp(-4) / 3
    found = peaks(np.array([0.0, 1.0]), np.array([0.0, 0.0]))
    np.testing.assert_allclose(found, [at_origin, at_one], rtol=1e-14)


def test_the_bins_are_of_equal_width_between_the_extremes() -> None:
    grid = np.stack(np.meshgrid(*[np.linspace(-3, 3, 601)] * 2), axis=-1).reshape(-1, 2)
    values = peaks(grid[:, 0], grid[:, 1])
    assert values.min() == pytest.approx(LOWEST, abs=1e-3)
    assert values.max() == pytest.approx(HIGHEST, abs=1e-3)
    assert LOWEST <= values.min() < values.max() <= HIGHEST
    edges = np.linspace(values.min(), values.max(), 6)
    expected = np.searchsorted(edges[1:-1], values)
    assert (expected != level(grid)).mean() < 1e-4  # the grid misses the extremes by a little


@pytest.mark.parametrize("balanced", [True, False])
def test_points_fill_the_square_and_have_their_level(balanced: bool) -> None:
    data = Peaks({"train": 1003, "val": 200, "test": 0}, balanced=balanced)
    assert (data.splits, data.num_classes, data.image_shape) == (("train", "val"), 5, (2,))
    batch = data.split("train").__getitems__(range(1003))
    assert batch["input"].dtype == torch.float32
    assert batch["input"].abs().max() <= 3
    assert np.array_equal(level(batch["input"].double().numpy()), batch["target"].numpy())
    counts = torch.bincount(batch["target"], minlength=5).tolist()
    if balanced:
        assert counts == [201, 201, 201, 200, 200]
    else:
        # Shares of the square's area: 2.8%, 12.2%, 72.4%, 9.8%, 2.8%.
        assert counts == pytest.approx([28, 122, 726, 98, 28], abs=45)


def test_points_follow_the_seed_alone() -> None:
    first = Peaks({"train": 50}).split("train")
    other = Peaks({"train": 50, "val": 20})
    assert torch.equal(first.values["input"], other.split("train").values["input"])
    assert not torch.equal(first.values["input"][:20], other.split("val").values["input"])
    assert not torch.equal(first.values["input"], Peaks({"train": 50}, seed=1).split("train").values["input"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_classes": 4}, r"data\.num_classes=4; expected 5"), ({"image_shape": [3]}, r"data\.image_shape=\[3\]")],
)
def test_other_shapes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Peaks({"train": 5}, **options)
