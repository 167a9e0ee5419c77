import math

import pytest
import torch

from mlotool.core import BoundModule
from mlotool.losses import architecture_analysis, architecture_cross_entropy
from mlotool.models import CellArchitecture, SearchNetwork


def test_both_problems_get_a_gradient() -> None:
    torch.manual_seed(0)
    model, architecture = SearchNetwork([1, 8, 8], 3, width=2, num_cells=3, num_nodes=1), CellArchitecture(1)
    batch = {"input": torch.randn(4, 1, 8, 8), "target": torch.tensor([0, 1, 2, 0])}
    output = architecture_cross_entropy(batch, model=BoundModule(model), architecture=BoundModule(architecture))
    output.loss.backward()
    expected = torch.nn.functional.cross_entropy(model(batch["input"], *architecture()), batch["target"])
    torch.testing.assert_close(output.loss, expected)
    for parameter in (*architecture.parameters(), model.stack.classifier.weight):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_the_gradient_of_the_architecture_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    model = SearchNetwork([1, 8, 8], 3, width=2, num_cells=3, num_nodes=1).double()
    architecture = CellArchitecture(1, scale=1.0).double()
    batch = {"input": torch.randn(4, 1, 8, 8, dtype=torch.float64), "target": torch.tensor([0, 1, 2, 0])}

    def loss(normal: torch.Tensor) -> torch.Tensor:
        role = BoundModule(architecture, {"normal": normal})
        return architecture_cross_entropy(batch, model=BoundModule(model, {}), architecture=role).loss

    normal = architecture.normal.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(normal), normal)
    direction = torch.randn_like(gradient)
    with torch.no_grad():
        slope = (loss(normal + 1e-6 * direction) - loss(normal - 1e-6 * direction)) / 2e-6
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def test_analysis_of_an_undecided_and_of_a_decided_architecture() -> None:
    architecture = CellArchitecture(num_nodes=1, scale=0.0)
    result = architecture_analysis([], architecture=BoundModule(architecture))
    assert float(result["normal_entropy"]) == pytest.approx(math.log(8))
    assert result["normal"].shape == (2, 8)
    with torch.no_grad():
        architecture.normal[0, 4] = architecture.normal[1, 3] = 50.0
    result = architecture_analysis([], architecture=BoundModule(architecture))
    assert str(result["genotype"]).startswith("{normal: [[sep_conv_3x3, 0], [skip_connect, 1]], reduction: ")
    assert float(result["normal_entropy"]) == pytest.approx(0.0, abs=1e-6)
    assert int(result["normal_skips"]) == 1
