"""What a forward reads of a layer itself is there after a mutator, and has the shape and type that it had."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Operator, Space
from tests.spaces.test_calls_of_spaces import Tied


class OtherWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half()


def test_a_candidate_without_the_parameter_is_infeasible() -> None:
    with pytest.raises(InfeasibleModelError, match=r"node 'layer\.weight' reads a tensor that is not there any more"):
        Space(Tied, [Operator("kind", "layer", {"identity": nn.Identity})], inputs=[4])


def test_a_candidate_with_another_parameter_is_infeasible() -> None:
    with pytest.raises(InfeasibleModelError, match=r"the model returns \(b, 7\), and without mutators \(b, 4\)"):
        Space(Tied, [Operator("kind", "layer", {"other": OtherWeight})], inputs=[4])


def test_a_candidate_that_changes_the_type_of_the_result_is_infeasible() -> None:
    with pytest.raises(InfeasibleModelError, match=r"returns \(b, 4\) of float16, and without mutators \(b, 4\);"):
        Space(partial(nn.Sequential, nn.Linear(4, 4), nn.ReLU()), [Operator("half", "1", {"half": Halved})], inputs=[4])
