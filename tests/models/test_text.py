import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mlotool.core.errors import ConfigError
from mlotool.models import PretrainedText, TextTransformer
from mlotool.models.text_network import attended


def _model(**settings: object) -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(20, 6, 3, width=8, num_heads=2, num_layers=2, hidden=16, **settings).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_padding_has_no_say(pooling: str) -> None:
    model = _model(pooling=pooling)
    words = torch.tensor([[5, 7, 3], [2, 9, 4]])
    padded = torch.cat([words, torch.zeros(2, 3, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded), model(words))
    assert not torch.allclose(model(padded), model(torch.where(padded == 0, 11, padded)))


def test_attention_is_torchs() -> None:
    block = _model().blocks[0]
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    is_word = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    query, key, value = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in block.query_key_value(x).chunk(3, dim=2))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_word[:, None, None, :])
    torch.testing.assert_close(
        block.output(attended(block.query_key_value(x), 2, is_word)), block.output(mixed.transpose(1, 2).flatten(2))
    )


def test_order_counts() -> None:
    model = _model()
    assert not torch.allclose(model(torch.tensor([[5, 7, 3]])), model(torch.tensor([[3, 7, 5]])))


def test_a_text_without_words_is_finite() -> None:
    assert torch.isfinite(_model()(torch.zeros(1, 6, dtype=torch.int64))).all()


def test_second_derivatives_are_those_of_finite_differences() -> None:
    model = _model()
    tokens, target = torch.tensor([[5, 7, 3, 0], [2, 9, 0, 0]]), torch.tensor([0, 2])
    theta = list(model.parameters())
    direction = [torch.randn_like(tensor) for tensor in theta]

    def gradient() -> tuple[torch.Tensor, ...]:
        loss = F.cross_entropy(model(tokens), target)
        return torch.autograd.grad(loss, theta, create_graph=True)

    product = torch.autograd.grad(gradient(), theta, direction, allow_unused=True)
    shifted = []
    for sign in (1e-5, -1e-5):
        with torch.no_grad():
            torch._foreach_add_(theta, direction, alpha=sign)
        shifted.append([each.detach() for each in gradient()])
        with torch.no_grad():
            torch._foreach_add_(theta, direction, alpha=-sign)
    for found, above, below in zip(product, *shifted, strict=True):
        expected = (above - below) / 2e-5
        torch.testing.assert_close(
            torch.zeros_like(expected) if found is None else found, expected, atol=1e-7, rtol=1e-4
        )


def test_heads_have_to_share_the_width() -> None:
    with pytest.raises(ConfigError, match=r"width=10 and num_heads=4.*Set width=8"):
        TextTransformer(20, 6, 3, width=10, num_heads=4)


def test_a_folder_without_weights_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found no config\.json and no model\.safetensors.*problems\.<name>"):
        PretrainedText(str(tmp_path), 2, 100, 40)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ConfigError, match=r"found no model\.safetensors"):
        PretrainedText(str(tmp_path), 2, 100, 40)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a small BERT."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_bert_of_a_folder(bert: Path) -> None:
    model = PretrainedText(str(bert), 3, 30, 12)
    assert all(module.training for module in model.modules())
    model.eval()
    tokens = torch.tensor([[5, 7, 3, 0], [2, 9, 0, 0]])
    assert model(tokens).shape == (2, 3)
    torch.testing.assert_close(model(tokens), model(F.pad(tokens, (0, 2))))
    loss = F.cross_entropy(model(tokens), torch.tensor([0, 2]))
    theta = list(model.parameters())
    slopes = torch.autograd.grad(loss, theta, create_graph=True)  # every parameter has a gradient
    second = torch.autograd.grad(sum(each.square().sum() for each in slopes), theta, allow_unused=True)
    assert any(each is not None and bool(each.any()) for each in second)
    with pytest.raises(ConfigError, match=r"vocabulary_size=31; expected at most 30"):
        PretrainedText(str(bert), 3, 31, 12)
    with pytest.raises(ConfigError, match=r"length=13; expected at most 12"):
        PretrainedText(str(bert), 3, 30, 13)


def test_what_is_no_encoder_is_refused(bert: Path) -> None:
    (bert / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ConfigError, match="no model could be read"):
        PretrainedText(str(bert), 3, 30, 12)
