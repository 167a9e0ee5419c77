import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.models import BoundedPerturbation


def test_perturbations_stay_within_the_radius_and_end_at_the_last_sample() -> None:
    perturbation = BoundedPerturbation([1, 3, 3], num_samples=4, radius=0.5, start="random")
    change = perturbation(torch.tensor([3, 4, 0, 9]))
    assert change.shape == (4, 1, 3, 3)
    assert change[[1, 3]].abs().sum() == 0
    size = change[[0, 2]].abs()
    assert (size <= 0.5).all() and (size > 0.49).all()


def test_zero_is_where_learning_starts() -> None:
    perturbation = BoundedPerturbation([2], num_samples=2, radius=0.5)
    change = perturbation(torch.tensor([0, 1]))
    assert change.abs().sum() == 0
    change.sum().backward()
    torch.testing.assert_close(perturbation.raw.grad, torch.full((2, 2), 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": -1.0}, "radius=-1.0; expected 0 or more"),
        ({"radius": 1.0, "start": "rand"}, "Did you mean 'random'"),
    ],
)
def test_what_is_no_perturbation_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BoundedPerturbation([2], 2, **options)  # type: ignore[arg-type]
