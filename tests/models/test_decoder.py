import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.models import Decoder
from tests.models.derivatives import direction, finite_differences, forward_over_reverse, reverse_over_reverse

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
    model = _model(**VARIANTS[variant])
    vector = direction(model)
    reverse = reverse_over_reverse(model, _loss, vector)
    torch.testing.assert_close(forward_over_reverse(model, _loss, vector), reverse, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(finite_differences(model, _loss, vector, 1e-6), reverse, rtol=1e-5, atol=1e-7)
    assert all(bool(each.any()) for each in reverse.values())


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


def test_embeddings_and_both_halves_are_dropped() -> None:
    model, tokens = _model(dropout=1.0), _tokens()
    assert not model(tokens).any()
    model.dropout.p = 0.0
    torch.testing.assert_close(model.features(tokens), model.norm(model.embedding(tokens)))


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


def test_a_model_in_bf16_runs() -> None:
    model, tokens = _model().bfloat16(), _tokens()
    logits = model(tokens)
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(logits.double(), _model()(tokens), rtol=0.1, atol=0.1)


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


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_thirty_two_layers_learn(feedforward: Any) -> None:
    torch.manual_seed(0)
    model = Decoder(20, width=32, hidden=64, num_heads=2, num_layers=32, feedforward=feedforward)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    tokens = torch.randint(0, 20, (4, 17))
    losses = []
    for _ in range(30):
        loss = model.losses(tokens[:, :-1], tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def test_odd_heads_and_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_size=5; .*Set kv_size=6\."):
        _model(kv_size=5)
    with pytest.raises(ConfigError, match=r"width=8 and num_heads=3; .*Set kv_size=2\."):
        _model(kv_size=None)
    with pytest.raises(ConfigError, match="feedforward: found 'relu'; expected one of gelu, swiglu"):
        _model(feedforward="relu")
    assert _model(kv_size=None, num_heads=2).blocks[0].attention.output.in_features == 8  # type: ignore[union-attr]
