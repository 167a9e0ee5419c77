"""`Unrolled(remat="auto")` is exact where buffers matter, and keeps no graph where equal bits are an accident."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from mlotool.hypergradient import Unrolled
from mlotool.program import Program
from tests.hypergradient.test_kept_graphs import AUTO, above, decision, resume, ticked
from tests.program.small import assert_identical, parameters


class Moving(nn.Module):
    """A layer whose forward pass reads a buffer that each training step moves.

    Args:
        is_count: the buffer is an integer.
    """

    def __init__(self, is_count: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.zeros((), dtype=torch.int64 if is_count else torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale += 1
        out: Tensor = self.layer(x) / self.scale.clone()
        return out


READERS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: spectral_norm(nn.Linear(3, 3).double()),
    "scale": lambda: Moving(is_count=False).double(),
    "count": lambda: Moving(is_count=True).double(),
    "batch_norm_in_eval_mode": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()).double(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_forward_pass_that_reads_buffers_is_the_same_with_graphs_and_without_and_resumes_to_the_bit(
    name: str,
) -> None:
    def make(hypergradient: Unrolled) -> Program:
        torch.manual_seed(0)
        net = READERS[name]()
        built = above(net, hypergradient)
        if name == "batch_norm_in_eval_mode":
            net[1].train(False)  # type: ignore[index]
        return built

    whole, first, second = (make(AUTO()) for _ in range(3))
    expected = ticked(whole, 14)
    assert_identical(ticked(make(Unrolled(remat=True)), 14), expected)
    # In the middle of an unroll: one of its three steps has been taken.
    resume(first, second, 7)
    assert_identical(parameters(second), expected)
    assert_identical(ticked(make(Unrolled(remat=False)), 14), expected)


def test_a_last_layer_that_begins_at_zero_hides_no_rounding() -> None:
    """Below it all gradients are zero at the first pullback, with a graph and without."""

    def make(hypergradient: Unrolled) -> Program:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 3)).double()
        nn.init.zeros_(net[2].weight)  # type: ignore[arg-type]
        built = above(net, hypergradient)
        built.problems["w"].optimizer.param_groups[0]["lr"] = 0.0  # type: ignore[union-attr]
        return built

    built = make(AUTO())
    ticked(built, 4)
    assert decision(built) is False
