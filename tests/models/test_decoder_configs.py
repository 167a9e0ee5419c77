"""The configs of decoders: sizes, and how a recipe takes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.config import build, compose
from mlotool.models import Decoder, SequenceWeigher

CONFIGS = Path(__file__).parents[2] / "conf" / "model"
MODULE = "problems.classifier.module"
# From table 6 of Kemaev et al. 2025: parameters (million), d_model, ffw_size, kv_size, n_heads, n_layers.
LADDER = [
    (44, 512, 2048, 64, 8, 8),
    (90, 640, 2560, 64, 10, 13),
    (140, 768, 3072, 64, 12, 15),
    (196, 896, 3584, 64, 14, 16),
    (278, 1024, 4096, 64, 16, 18),
    (489, 1280, 5120, 128, 10, 21),
    (587, 1408, 5632, 128, 11, 21),
    (724, 1536, 6144, 128, 12, 22),
    (1018, 1792, 7168, 128, 14, 23),
]


def _settings(name: str, *overrides: str) -> dict[str, Any]:
    config = compose("plain", [f"model@{MODULE}={name}", "data=synthetic_text", *overrides])
    settings = dict(config.problems.classifier.module)
    assert settings.pop("_target_") == "mlotool.models.Decoder"
    return settings


def _num_parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize(("millions", "width", "hidden", "kv_size", "num_heads", "num_layers"), LADDER)
def test_the_ladder_is_the_papers(
    millions: int, width: int, hidden: int, kv_size: int, num_heads: int, num_layers: int
) -> None:
    settings = _settings(f"decoder_{millions}m")
    with torch.device("meta"):
        model = Decoder(**settings)
    assert (settings["vocabulary_size"], settings["feedforward"], settings["tied"]) == (32000, "gelu", True)
    block = model.blocks[0]
    assert isinstance(block.attention, nn.Module)
    assert block.attention.output.in_features == kv_size * num_heads
    # Hoffmann et al. have relative positions with a projection (width, heads x kv_size) a layer, where here are
    # rotations; the embedding counts, once. Below a million are their biases, and what their table rounds away.
    projections = num_layers * width * num_heads * kv_size
    assert abs(_num_parameters(model) + projections - millions * 1e6) < 0.8e6
    told = f"with {_num_parameters(model) / 1e6:.1f} million parameters"
    assert told in (CONFIGS / f"decoder_{millions}m.yaml").read_text()
    assert f"counts {projections / 1e6:.1f} million" in (CONFIGS / f"decoder_{millions}m.yaml").read_text()


def test_the_ladder_is_whole() -> None:
    assert {path.stem for path in CONFIGS.glob("decoder_*m.yaml")} == {f"decoder_{row[0]}m" for row in LADDER}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["width=128"], (128, 1024, 16, 8, 16)),
        (["width=2048"], (2048, 1024, 256, 8, 16)),
        (["hidden=8192", "width=384", "kv_size=32"], (384, 8192, 32, 8, 16)),
        (["num_heads=2", "width=768"], (768, 1024, 384, 2, 16)),
        (["num_heads=32", "width=768"], (768, 1024, 24, 32, 16)),
        (["num_layers=64"], (256, 1024, 32, 8, 64)),
    ],
)
def test_the_sweeps_of_table_5(changes: list[str], expected: tuple[int, ...]) -> None:
    settings = _settings("decoder_sweep", *[f"{MODULE}.{each}" for each in changes])
    with torch.device("meta"):
        model = Decoder(**settings)
    attention: Any = model.blocks[0].attention
    hidden = model.blocks[0].feedforward.input.out_features  # type: ignore[union-attr]
    kv_size = attention.output.in_features // attention.num_heads
    assert (model.width, hidden, kv_size, attention.num_heads, len(model.blocks)) == expected


def test_the_small_one_has_the_vocabulary_of_the_data() -> None:
    assert _settings("decoder")["vocabulary_size"] == 100
    assert _settings("decoder", f"{MODULE}.num_layers=32")["num_layers"] == 32


def test_a_weigher_takes_any_decoder() -> None:
    choices = [f"model@{MODULE}=sequence_weigher", f"+model@{MODULE}.decoder=decoder", "data=synthetic_text"]
    config = compose("plain", [*choices, f"{MODULE}.decoder.num_layers=3", f"{MODULE}.initial=0.25"])
    weigher = build(config).program.problems["classifier"].module
    assert isinstance(weigher, SequenceWeigher)
    assert isinstance(weigher.decoder, Decoder)
    assert len(weigher.decoder.blocks) == 3
    weights = weigher(torch.ones(2, 40, dtype=torch.int64))
    torch.testing.assert_close(weights, torch.full((2,), 0.25))
