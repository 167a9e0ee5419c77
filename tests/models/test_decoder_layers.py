import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlotool.models.decoder import CausalAttention, Feedforward, RMSNorm, rotate


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_the_norm_is_torchs() -> None:
    norm, reference, x = RMSNorm(6).double(), nn.RMSNorm(6, eps=1e-6).double(), _draw(2, 3, 6)
    with torch.no_grad():
        norm.weight.copy_(_draw(6))
        reference.weight.copy_(_draw(6))
    torch.testing.assert_close(norm(x), reference(x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_half_precision_is_that_of_single_rounded_once(dtype: torch.dtype) -> None:
    norm, x = RMSNorm(64), (300 * _draw(4, 64)).to(dtype)  # squares that fp16 does not hold
    assert norm(x).dtype is dtype
    assert torch.equal(norm(x), norm(x.float()).to(dtype))


def test_rotations_keep_lengths_and_the_first_position() -> None:
    x = _draw(2, 5, 8)
    turned = rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1], x[:, 1])


def test_scores_of_rotated_vectors_depend_on_the_difference_of_positions_alone() -> None:
    length, query, key = 9, _draw(8), _draw(3, 8)[0]
    scores = rotate(query.expand(length, 8)) @ rotate(key.expand(length, 8)).T
    for difference in range(-length + 1, length):
        diagonal = scores.diagonal(difference)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert len({round(float(scores.diagonal(each)[0]), 6) for each in range(-length + 1, length)}) == 2 * length - 1


def test_a_rotation_is_a_product_of_complex_numbers() -> None:
    x = _draw(7, 6)
    points = torch.complex(x[:, :3], x[:, 3:])
    frequency = torch.tensor([100.0 ** (-2 * plane / 6) for plane in range(3)], dtype=torch.float64)
    angle = torch.arange(7, dtype=torch.float64)[:, None] * frequency
    turned = points * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], dim=1)
    torch.testing.assert_close(rotate(x, base=100.0), expected, rtol=1e-13, atol=1e-13)


def test_angles_of_half_precision_are_exact_to_single_precision() -> None:
    x = torch.ones(4096, 2, dtype=torch.bfloat16)  # positions that bf16 does not hold
    torch.testing.assert_close(rotate(x), rotate(x.double()).to(torch.bfloat16), rtol=0.01, atol=0.01)


def test_attention_is_torchs() -> None:
    attention, x = CausalAttention(8, num_heads=3, kv_size=4).double(), _draw(2, 5, 8)
    query, key, value = (each.unflatten(2, (3, 4)).transpose(1, 2) for each in attention.query_key_value(x).chunk(3, 2))
    mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
    expected = attention.output(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)


def test_the_gated_feedforward_is_torchs_silu() -> None:
    layer, x = Feedforward(4, 6, "swiglu").double(), _draw(2, 3, 4)
    assert layer.gate is not None
    torch.testing.assert_close(layer(x), layer.output(F.silu(layer.gate(x)) * layer.input(x)))
