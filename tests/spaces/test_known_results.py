"""Shapes are computed once for equal layers, and for code of others at each call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Operator, Space
from mlotool.spaces.shapes import structure_of


class Own(nn.Module):
    """Code of a user's."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Linear(4, 2), lambda: nn.Linear(4, 3)),
        (lambda: nn.Sequential(nn.Linear(4, 2)), lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU())),
        (lambda: nn.Conv2d(4, 4, 3), lambda: nn.Conv2d(4, 4, 3, stride=2)),
        (lambda: nn.Softmax(0), lambda: nn.Softmax(1)),
        (lambda: nn.Linear(4, 2), lambda: nn.Linear(4, 2, dtype=torch.float64)),
    ],
)
def test_layers_are_equal_by_what_shapes_depend_on(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module]
) -> None:
    assert structure_of(one()) == structure_of(one()) is not None
    assert structure_of(one()) != structure_of(other())


def test_what_others_have_written_is_called() -> None:
    hooked = nn.Linear(4, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert structure_of(Own()) is structure_of(nn.Sequential(Own())) is structure_of(hooked) is None


def test_what_does_not_fit_is_refused_each_time() -> None:
    wide = Operator("act", "1", {"same": None, "wide": lambda: nn.Linear(3, 3)})
    for _ in range(2):
        with pytest.raises(InfeasibleModelError, match="does not take what it is given"):
            Space(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [wide], inputs=[4], decisions={"act_0": "wide"})
