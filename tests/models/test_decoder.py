import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlotool.core.bound_module import BoundModule
from mlotool.models import Decoder, SequenceWeigher
from mlotool.models.decoder import RMSNorm, rotate, token_losses
from tests.data.test_conf import CONF, resolved
from tests.live_storage import LiveStorage
from tests.models import derivatives

VARIANTS: dict[str, dict[str, Any]] = {
    "gelu": {"feedforward": "gelu"},
    "swiglu": {"feedforward": "swiglu"},
    "untied": {"tied": False},
}


def _model(**settings: Any) -> Decoder:
    torch.manual_seed(0)
    given = {"width": 8, "hidden": 12, "num_heads": 3, "kv_size": 4, "num_layers": 2, **settings}
    model = Decoder(11, **given).double()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name:
                each.add_(0.1 * torch.randn_like(each))  # scales of one would hide that they are forgotten
    return model


def _tokens(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(1))


def _loss(model: nn.Module) -> torch.Tensor:
    tokens = _tokens()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_future_has_no_say(variant: str) -> None:
    model, tokens = _model(**VARIANTS[variant]), _tokens()
    logits = model(tokens)
    for place in range(1, 6):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        found = model(changed)
        assert torch.equal(found[:, :place], logits[:, :place])
        assert not torch.isclose(found[:, place:], logits[:, place:]).all(dim=2).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_is_that_of_loops_in_numpy(variant: str) -> None:
    model, tokens = _model(num_layers=1, **VARIANTS[variant]), _tokens()
    weights = {name: each.detach().numpy() for name, each in model.named_parameters()}
    expected = np.stack([_logits_by_loops(weights, text.tolist(), num_heads=3) for text in tokens])
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def _logits_by_loops(weights: dict[str, np.ndarray], text: list[int], num_heads: int) -> np.ndarray:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return weights[f"{name}.weight"] * x / math.sqrt((x * x).mean() + 1e-6)

    def turned(x: np.ndarray, place: int) -> np.ndarray:
        half = len(x) // 2
        y = np.empty_like(x)
        for plane in range(half):
            angle = place * 10000.0 ** (-2 * plane / len(x))
            y[plane] = x[plane] * math.cos(angle) - x[plane + half] * math.sin(angle)
            y[plane + half] = x[plane] * math.sin(angle) + x[plane + half] * math.cos(angle)
        return y

    xs = [weights["embedding.weight"][token] for token in text]
    read = [weights["blocks.0.attention.query_key_value.weight"] @ norm(x, "blocks.0.norm_1") for x in xs]
    size = len(read[0]) // 3 // num_heads
    mixed = [np.zeros(num_heads * size) for _ in text]
    for head in range(num_heads):
        query, key, value = (
            [each[(third * num_heads + head) * size : (third * num_heads + head + 1) * size] for each in read]
            for third in range(3)
        )
        for i in range(len(text)):
            scores = [turned(query[i], i) @ turned(key[j], j) / math.sqrt(size) for j in range(i + 1)]
            shares = np.exp(scores) / np.exp(scores).sum()
            mixed[i][head * size : (head + 1) * size] = sum(shares[j] * value[j] for j in range(i + 1))
    xs = [x + weights["blocks.0.attention.output.weight"] @ y for x, y in zip(xs, mixed, strict=True)]
    for i, x in enumerate(xs):
        normed = norm(x, "blocks.0.norm_2")
        hidden = weights["blocks.0.feedforward.input.weight"] @ normed
        if "blocks.0.feedforward.gate.weight" in weights:
            gate = weights["blocks.0.feedforward.gate.weight"] @ normed
            hidden = gate / (1 + np.exp(-gate)) * hidden
        else:
            hidden = np.array([0.5 * each * (1 + math.erf(each / math.sqrt(2))) for each in hidden])
        xs[i] = x + weights["blocks.0.feedforward.output.weight"] @ hidden
    head_weight = weights.get("head.weight", weights["embedding.weight"])
    return np.stack([head_weight @ norm(x, "norm") for x in xs])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives_agree_in_every_mode(variant: str) -> None:
    derivatives.assert_second_derivatives(_model(**VARIANTS[variant]), _loss)


def test_a_tied_head_adds_its_gradient_to_that_of_the_embedding() -> None:
    tied, apart = _model(), _model(tied=False)
    apart.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    _loss(tied).backward()
    _loss(apart).backward()
    assert apart.head is not None
    expected = apart.embedding.weight.grad + apart.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, expected)
    assert "head.weight" not in dict(tied.named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_role_takes_losses_with_its_own_parameters(variant: str) -> None:
    model, tokens = _model(**VARIANTS[variant]), _tokens()
    other = {name: 2 * each.detach() for name, each in model.named_parameters()}
    role = BoundModule(model, other)
    losses = role.method("losses", tokens[:, :-1], tokens[:, 1:], chunk=4)
    expected = F.cross_entropy(role(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses, expected)
    assert not torch.allclose(losses, model.losses(tokens[:, :-1], tokens[:, 1:]))


def test_dropout_is_that_of_the_roles_mode() -> None:
    model, tokens = _model(dropout=0.5), _tokens()
    assert not torch.equal(model(tokens), model(tokens))
    role = BoundModule(model, training=False)
    assert torch.equal(role(tokens), role(tokens))
    assert torch.equal(role(tokens), _model()(tokens))
    assert model.training


def test_bf16_autocast_is_near_and_keeps_the_stream_precise() -> None:
    model, tokens = _model(num_layers=4).float(), _tokens()
    expected = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.features(tokens).dtype is torch.float32
        logits = model(tokens)
        losses = model.losses(tokens, tokens, chunk=4)
    assert (logits.dtype, losses.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.05)
    losses.mean().backward()
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters())


def test_depth_changes_neither_the_logits_nor_the_slopes_at_the_start() -> None:
    found = {}
    for depth in (2, 32):
        torch.manual_seed(0)
        model = Decoder(50, width=64, hidden=128, num_layers=depth)
        tokens = torch.randint(0, 50, (4, 32))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        slopes = [float(block.feedforward.input.weight.grad.norm()) for block in model.blocks]  # type: ignore[union-attr]
        assert max(slopes) < 6 * min(slopes)
        found[depth] = float(loss.detach()), float(logits.detach().std()), sum(slope**2 for slope in slopes) ** 0.5
    assert found[2] == pytest.approx(found[32], rel=0.4)
    assert found[32][0] < math.log(50) + 1.0


# Millions of parameters, from table 6 of Kemaev et al. 2025.
@pytest.mark.parametrize("millions", [44, 90, 140, 196, 278, 489, 587, 724, 1018])
def test_the_ladder_is_the_papers(millions: int) -> None:
    _, settings = resolved("model", f"decoder_{millions}m", "synthetic_text")
    with torch.device("meta"):
        model = Decoder(**settings)
    assert (settings["vocabulary_size"], settings["feedforward"], settings["tied"]) == (32000, "gelu", True)
    # Hoffmann et al. have relative positions with a projection (width, heads x kv_size) a layer, where here are
    # rotations; the embedding counts, once. Below a million are their biases, and what their table rounds away.
    projections = sum(block.attention.output.weight.numel() for block in model.blocks)  # type: ignore[union-attr]
    num_parameters = sum(each.numel() for each in model.parameters())
    assert abs(num_parameters + projections - millions * 1e6) < 0.8e6
    told = (CONF / "model" / f"decoder_{millions}m.yaml").read_text()
    assert f"with {num_parameters / 1e6:.1f} million parameters" in told
    assert f"counts {projections / 1e6:.1f} million" in told


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["width=128"], (128, 1024, 16, 8, 16)),
        (["hidden=8192", "width=384", "kv_size=32"], (384, 8192, 32, 8, 16)),
        (["num_heads=2", "width=768"], (768, 1024, 384, 2, 16)),
        (["num_layers=64"], (256, 1024, 32, 8, 64)),
    ],
)
def test_the_sweeps_of_table_5(changes: list[str], expected: tuple[int, ...]) -> None:
    _, settings = resolved("model", "decoder_sweep", "synthetic_text", changes)
    with torch.device("meta"):
        model = Decoder(**settings)
    attention: Any = model.blocks[0].attention
    hidden = model.blocks[0].feedforward.input.out_features  # type: ignore[union-attr]
    kv_size = attention.output.in_features // attention.num_heads
    assert (model.width, hidden, kv_size, attention.num_heads, len(model.blocks)) == expected


def test_a_rotation_is_a_product_of_complex_numbers() -> None:
    """So scores depend on the difference of positions alone, and lengths stay; exactly in half precision too."""
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    frequency = torch.tensor([100.0 ** (-2 * plane / 6) for plane in range(3)], dtype=torch.float64)
    angle = torch.arange(7, dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(x[:, :3], x[:, 3:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], dim=1)
    torch.testing.assert_close(rotate(x, base=100.0), expected, rtol=1e-13, atol=1e-13)
    coarse = torch.ones(4096, 2, dtype=torch.bfloat16)  # positions that bf16 does not hold
    torch.testing.assert_close(rotate(coarse), rotate(coarse.double()).to(torch.bfloat16), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_norm_is_torchs_and_that_of_single_precision_rounded_once(dtype: torch.dtype) -> None:
    norm, x = RMSNorm(64), (300 * torch.randn(4, 64)).to(dtype)  # squares that fp16 does not hold
    if dtype is torch.float64:
        reference = nn.RMSNorm(64, eps=1e-6).double()
        with torch.no_grad():
            for each in (norm.double(), reference):
                each.weight.copy_(torch.linspace(0.5, 2, 64))
        torch.testing.assert_close(norm(x), reference(x), rtol=1e-14, atol=1e-14)
    else:
        assert norm(x).dtype is dtype
        assert torch.equal(norm(x), norm(x.float()).to(dtype))


TARGETS = torch.randint(0, 13, (3, 7), generator=torch.Generator().manual_seed(0))


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Parameter(torch.randn(3, 7, 5, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(13, 5, dtype=torch.float64))

    def losses(self, chunk: int | None) -> torch.Tensor:
        return token_losses(self.features, self.weight, TARGETS, chunk)


@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 21, 100])
def test_losses_are_the_plain_ones(chunk: int | None) -> None:
    head = _Head()
    expected = F.cross_entropy((head.features @ head.weight.T).transpose(1, 2), TARGETS, reduction="none")
    torch.testing.assert_close(head.losses(chunk), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("chunk", [4, 7])
def test_derivatives_are_the_plain_ones(chunk: int) -> None:
    head = _Head()
    theta, vector = list(head.parameters()), derivatives.direction(head)
    slopes, plain = (torch.autograd.grad(head.losses(each).square().sum(), theta) for each in (chunk, 21))
    torch.testing.assert_close(slopes, plain, rtol=1e-12, atol=1e-12)

    def loss(module: nn.Module) -> torch.Tensor:
        return module.losses(chunk).square().sum()  # type: ignore[operator]

    plainly = derivatives.reverse_over_reverse(head, lambda module: module.losses(21).square().sum(), vector)  # type: ignore[operator]
    for product in (derivatives.reverse_over_reverse, derivatives.forward_over_reverse):
        torch.testing.assert_close(product(head, loss, vector), plainly, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(derivatives.finite_differences(head, loss, vector, 1e-5), plainly, rtol=1e-6, atol=1e-6)


def test_coarse_logits_have_precise_losses() -> None:
    features, weight = torch.randn(9, 4).bfloat16(), torch.randn(13, 4).bfloat16()
    targets = torch.arange(9)
    expected = F.cross_entropy((features @ weight.T).double(), targets, reduction="none")
    found = token_losses(features, weight, targets, chunk=2)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def _peak(chunk: int) -> int:
    """Return the bytes that live at once in a Hessian-vector product of 64 tokens and 1,000 words."""
    features, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    targets, vector = torch.arange(64), [torch.randn(64, 4), torch.randn(1000, 4)]
    with LiveStorage() as live:
        slopes = torch.autograd.grad(
            token_losses(features, weight, targets, chunk).sum(), [features, weight], create_graph=True
        )
        torch.autograd.grad(slopes, [features, weight], vector)
    return live.peak


def test_the_logits_of_all_tokens_never_live_at_once() -> None:
    logits = 64 * 1000 * 4
    assert _peak(64) > 3 * logits
    assert _peak(4) < logits


def _weigher(**settings: Any) -> SequenceWeigher:
    torch.manual_seed(0)
    return SequenceWeigher(Decoder(11, width=8, hidden=12, num_heads=2), **settings).double()


@pytest.mark.parametrize(("per", "shape"), [("sequence", (3,)), ("token", (3, 6))])
def test_all_weights_begin_as_said_and_then_differ(per: str, shape: tuple[int, ...]) -> None:
    weigher, tokens = _weigher(per=per, initial=0.3), _tokens(3)
    weights = weigher(tokens)
    torch.testing.assert_close(weights, torch.full(shape, 0.3, dtype=torch.float64))
    (weights * torch.arange(weights.numel()).reshape(shape)).sum().backward()
    assert bool(weigher.output.weight.grad.any())
    with torch.no_grad():
        weigher.output.weight.sub_(0.01 * weigher.output.weight.grad)
    weights = weigher(tokens)
    assert len({round(float(each), 9) for each in weights.detach().flatten()}) == weights.numel()


def test_no_weight_falls_below_the_smallest() -> None:
    weigher, tokens = _weigher(initial=0.3, smallest=0.1), _tokens(3)
    torch.testing.assert_close(weigher(tokens), torch.full((3,), 0.3, dtype=torch.float64))
    with torch.no_grad():
        weigher.output.bias.fill_(-50.0)
        torch.testing.assert_close(weigher(tokens), torch.full((3,), 0.1, dtype=torch.float64))
        weigher.output.bias.fill_(50.0)
        torch.testing.assert_close(weigher(tokens), torch.ones(3, dtype=torch.float64))


def test_the_weight_of_a_token_knows_what_comes_before_it_alone() -> None:
    weigher, tokens = _weigher(per="token"), _tokens(3)
    torch.nn.init.normal_(weigher.output.weight)
    changed = torch.cat([tokens[:, :5], (tokens[:, 5:] + 1) % 11], dim=1)
    found, expected = weigher(changed), weigher(tokens)
    assert torch.equal(found[:, :5], expected[:, :5])
    assert not torch.isclose(found[:, 5], expected[:, 5]).any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
def test_second_derivatives_of_weights_agree_in_every_mode() -> None:
    weigher, tokens = _weigher(), _tokens(3)
    torch.nn.init.normal_(weigher.output.weight)
    derivatives.assert_second_derivatives(weigher, lambda module: module(tokens).square().sum())
