"""Every operator of a loss under forward over reverse: its products, or an error that names it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import forward_mode, twice_differentiable_mode
from tests.core.operators import OPERATORS
from tests.core.operators.building import inputs_of
from tests.core.operators.products import (
    Loss,
    difference,
    direction,
    distance,
    forward,
    forward_by_autograd,
    loss_of,
    reverse,
)

pytestmark = [
    # torch.func opens levels of forward mode itself.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

REFUSED = {
    **{name: name for name in ("igamma", "index_reduce", "ormqr", "segment_reduce")},
    "checkpoint": "mlotool.remat",
    "ctc_loss": "_ctc_loss",
    "grid_sample 3d": "grid_sampler_3d",
    "nested tensor": "_nested_tensor_from_tensor_list",
    "scatter_reduce prod": "scatter_reduce",
    "sparse.mm": "_to_sparse",
    "special.zeta": "special_zeta",
}
"""By what the error names."""

REFUSED_TWICE = {"ctc_loss": "_ctc_loss_backward", "segment_reduce": "_segment_reduce_backward"}
if torch.__version__ < "2.14":
    REFUSED_TWICE["grid_sample 3d"] = "grid_sampler_3d_backward"
NOT_FINITE = {"norm at zero": "torch's second derivative is 0 / 0"}
OLDER = ("cdist", "pdist", "grid_sample")
"""What torch before 2.14 differentiates once."""
TAKEN = sorted(OPERATORS.keys() - REFUSED.keys())


def setting(name: str) -> tuple[Loss, list[Tensor], list[Tensor]]:
    """Return a loss of the operator, a point and a direction."""
    if name == "aminmax" and torch.__version__ < "2.15":
        pytest.skip("torch 2.9 has no gradient of it")
    spec, operator = OPERATORS[name]
    tensors = inputs_of(spec)
    return loss_of(operator), tensors, direction(tensors)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_products_are_those_of_differences(name: str):
    loss, tensors, vector = setting(name)
    tangents, found = lambda: forward_mode("w"), {}
    if name in TAKEN:
        found["forward"] = forward(loss, tensors, vector, tangents)
        found["by autograd"] = forward_by_autograd(loss, tensors, vector, tangents)
    if name in TAKEN and len(tensors) > 1:
        alone = [[u if k == place else None for k, u in enumerate(vector)] for place in range(len(tensors))]
        parts = [forward(loss, tensors, each, tangents) for each in alone]
        found["where one tensor alone has a tangent"] = [sum(each) for each in zip(*parts, strict=True)]
    if name not in REFUSED_TWICE.keys() | NOT_FINITE.keys():
        found["reverse"] = reverse(loss, tensors, vector, lambda: twice_differentiable_mode("w"))
    if name in TAKEN and name.startswith(OLDER):
        found["reverse by what older versions take"] = reverse(loss, tensors, vector, tangents)
    expected = difference(loss, tensors, vector)
    errors = {way: distance(each, expected) for way, each in found.items()}
    assert not {way: error for way, error in errors.items() if not error < 1e-7}


@pytest.mark.skipif(torch.__version__ < "2.14", reason="there is no double backward to compare with")
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances_of_equal_rows_are_as_torch_has_them_in_double_backward(p: float):
    """A difference says nothing there."""
    x = torch.tensor([[1.0, -1.0, 0.5], [1.0, -1.0, 0.5], [2.0, 2.5, 0.0]], dtype=torch.float64)
    for operator in (lambda x: torch.cdist(x, x, p), lambda x: F.pdist(x, p)):

        def loss(x: Tensor, operator: Callable[[Tensor], Tensor] = operator) -> Tensor:
            return (operator(x) + 0.3 * operator(x) ** 2).sum()

        expected = reverse(loss, [x], direction([x]))
        for way in (forward, reverse):
            assert distance(way(loss, [x], direction([x]), lambda: forward_mode("w")), expected) < 1e-12


@pytest.mark.parametrize("name", TAKEN)
def test_values_are_those_of_the_operators(name: str):
    spec, operator = OPERATORS[name]

    def value(dtype: torch.dtype) -> Tensor:
        torch.manual_seed(5)
        found = operator(*inputs_of(spec, dtype))
        return torch.view_as_real(found) if found.is_complex() else found

    expected = value(torch.float64), value(torch.float32)
    for mode in (forward_mode, twice_differentiable_mode):
        with mode("w"):
            found = value(torch.float64), value(torch.float32)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


AUTOCAST = """
    silu mish hardsigmoid group_norm torch._weight_norm mse_loss huber_loss prod embedding_bag sdpa cdist grid_sample
    soft_margin_loss multi_margin_loss multilabel_margin_loss masked_scatter logit cumprod cholesky_inverse
    triangular_solve linalg.solve linalg.det logdet
"""
NOT_IN_BF16 = {"linalg.det", "logdet"}


@pytest.mark.parametrize("name", AUTOCAST.split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_the_operators(name: str, dtype: torch.dtype):
    if dtype is torch.bfloat16 and name in NOT_IN_BF16:
        pytest.skip("torch has none itself")
    spec, operator = OPERATORS.get(name) or next(each for key, each in OPERATORS.items() if key.startswith(name))
    tensors = inputs_of(spec, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = operator(*tensors)
        with forward_mode("w"):
            found = operator(*tensors)
    assert found.dtype is expected.dtype
    tolerance = 1e-4 if found.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", ["sdpa", "MultiheadAttention", "TransformerEncoderLayer"])
def test_products_of_attention_under_autocast_are_those_of_double_backward(layer: str):
    torch.manual_seed(0)
    x, u, mask = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(5, 5)
    block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def called(x: Tensor) -> Tensor:
        if layer == "TransformerEncoderLayer":
            return block(x)
        if layer == "MultiheadAttention":
            return block.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        # In bf16, as a projection returns it, beside float32.
        return F.scaled_dot_product_attention(x @ torch.eye(8), x, x, attn_mask=mask)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = called(x)
        return (y.float().square() * torch.linspace(0.5, 1.5, 8)).sum()

    expected = reverse(loss, [x], [u], lambda: twice_differentiable_mode("w"))
    assert distance(forward(loss, [x], [u], lambda: forward_mode("w")), expected) < 0.02
    assert distance(forward_by_autograd(loss, [x], [u], lambda: forward_mode("w")), expected) < 0.02


@pytest.mark.parametrize(("name", "operator"), REFUSED.items())
def test_what_has_no_tangents_is_named(name: str, operator: str):
    loss, tensors, vector = setting(name)
    with pytest.raises(
        ConfigError, match=rf"(?s)problems\.w\.loss: found (?=.*{operator}).*product: forward.*expected"
    ):
        forward(loss, tensors, vector, lambda: forward_mode("w"))


@pytest.mark.parametrize(("name", "operator"), REFUSED_TWICE.items())
def test_what_has_no_second_derivative_is_named(name: str, operator: str):
    loss, tensors, vector = setting(name)
    with pytest.raises(ConfigError, match=rf"problems\.w\.loss: found .*{operator}.*product: reverse.*expected"):
        reverse(loss, tensors, vector, lambda: twice_differentiable_mode("w"))
