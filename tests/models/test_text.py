import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import forward_mode
from mlotool.models import PretrainedCausalLM, PretrainedText, SequenceWeigher, TextTransformer
from mlotool.models.text_network import attended
from tests.models import derivatives


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
    assert not torch.allclose(model(words), model(words.flip(1)))  # order counts
    assert torch.isfinite(model(torch.zeros(1, 6, dtype=torch.int64))).all()


def test_attention_is_torchs() -> None:
    block = _model().blocks[0]
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    is_word = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    query, key, value = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in block.query_key_value(x).chunk(3, dim=2))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_word[:, None, None, :])
    torch.testing.assert_close(
        block.output(attended(block.query_key_value(x), 2, is_word)), block.output(mixed.transpose(1, 2).flatten(2))
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
def test_second_derivatives_agree_in_every_mode() -> None:
    model = _model()
    tokens, target = torch.tensor([[5, 7, 3, 0], [2, 9, 0, 0]]), torch.tensor([0, 2])

    def loss(module: nn.Module) -> torch.Tensor:
        return F.cross_entropy(module(tokens), target)

    derivatives.assert_second_derivatives(model, loss)


def test_a_folder_without_weights_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ConfigError, match=r"pretrained: .*model\.safetensors"):
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
    with pytest.raises(ConfigError, match=r"vocabulary_size: found 31; expected at most 30"):
        PretrainedText(str(bert), 3, 31, 12)
    with pytest.raises(ConfigError, match=r"length: found 13; expected at most 12"):
        PretrainedText(str(bert), 3, 30, 13)


NEWER = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CAPPED = {"final_logit_softcapping": 0.5}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 12, **NO_DROPOUT},
    "Llama": {**NEWER, "max_position_embeddings": 12},
    "Gemma2": {**NEWER, "max_position_embeddings": 12, "num_key_value_heads": 1, "head_dim": 4, **CAPPED},
}
"""Of Gemma 2 logits are no product with the head: they are capped."""


def _saved(kind: str, folder: Path) -> str:
    """Return the folder of a small model of the kind."""
    transformers = pytest.importorskip("transformers")
    # Without padding: the embedding of one gets no gradient, so a product there is not what a difference shows.
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(vocab_size=11, **ids, **SIZES[kind])
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    getattr(transformers, f"{kind}{suffix}")(config).save_pretrained(folder)
    return str(folder)


def _tokens() -> torch.Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(1))


def _loss(module: nn.Module) -> torch.Tensor:
    tokens = _tokens()
    return module.losses(tokens[:, :-1], tokens[:, 1:], chunk=3).square().sum()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("kind", SIZES)
def test_a_language_model_of_a_folder(kind: str, tmp_path: Path) -> None:
    model = PretrainedCausalLM(_saved(kind, tmp_path), 11, 12).double()
    assert all(module.training for module in model.modules())
    tokens = _tokens()
    logits = model(tokens)
    changed = torch.cat([tokens[:, :5], (tokens[:, 5:] + 1) % 11], dim=1)
    torch.testing.assert_close(model(changed)[:, :5], logits[:, :5])
    expected = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    torch.testing.assert_close(model.losses(tokens, tokens, chunk=3), expected)
    assert (kind == "Gemma2") is not torch.allclose(logits, model.features(tokens) @ model.head_weight.T)

    vector = {name: 0.02 * each for name, each in derivatives.direction(model).items()}
    reverse = derivatives.reverse_over_reverse(model, _loss, vector)
    # Llama and Gemma go through fp32, whatever they are in.
    exact, step, near = (1e-10, 1e-5, 1e-6) if kind == "GPT2" else (1e-5, 1e-3, 1e-3)
    with forward_mode("model"):  # as products of a run
        assert _distance(derivatives.forward_over_reverse(model, _loss, vector), reverse) < exact
    assert _distance(derivatives.finite_differences(model, _loss, vector, step), reverse) < near


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest distance of two tensors over the length of the second."""
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def test_it_plays_roles_and_weighs(tmp_path: Path) -> None:
    model, tokens = PretrainedCausalLM(_saved("GPT2", tmp_path), 11, 12), _tokens()
    zero = BoundModule(model, {name: torch.zeros_like(each) for name, each in model.named_parameters()})
    losses = zero.method("losses", tokens, tokens, chunk=3)
    torch.testing.assert_close(losses, torch.full((2, 6), 11.0).log())
    torch.testing.assert_close(SequenceWeigher(model, initial=0.2)(tokens), torch.full((2,), 0.2))


def test_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = _saved("GPT2", tmp_path)
    with pytest.raises(ConfigError, match=r"vocabulary_size: found 12; expected at most 11"):
        PretrainedCausalLM(folder, 12, 12)
    with pytest.raises(ConfigError, match=r"length: found 13; expected at most 12"):
        PretrainedCausalLM(folder, 11, 13)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ConfigError, match="no model could be read"):
        PretrainedCausalLM(folder, 11, 12)
