"""Activations, normalization, attention, and layers with parameters."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.core.operators import building
from tests.core.operators.building import CHOICE, MASK, Operators, attention, from_module, normalized, sampled, seeded

QKV = "r1,2,3,4 r1,2,3,4 r1,2,3,4"

_NAMES = """
    relu relu6 elu selu celu gelu silu mish hardswish hardsigmoid hardtanh hardshrink softshrink tanhshrink softplus
    softsign tanh sigmoid logsigmoid leaky_relu rrelu
"""
ACTIVATIONS: Operators = {name: ("r3,4", getattr(F, name)) for name in _NAMES.split()} | {
    "gelu tanh": ("r3,4", lambda x: F.gelu(x, approximate="tanh")),
    "prelu": ("r3,4 r1", F.prelu),
    "glu": ("r3,4", F.glu),
    "softmax": ("r3,4", lambda x: F.softmax(x, -1)),
    "log_softmax": ("r3,4", lambda x: F.log_softmax(x, -1)),
    "gumbel_softmax": ("r3,4", seeded(F.gumbel_softmax)),
    "silu in place": ("r3,4", lambda x: F.silu(x * 1.0, inplace=True)),
    "mish in place": ("r3,4", lambda x: F.mish(x * 1.0, inplace=True)),
    "torch.nn.SiLU": ("r3,4", nn.SiLU()),
}

NORMS: Operators = {
    "layer_norm": ("r3,4 r4 r4", lambda x, w, b: F.layer_norm(x, (4,), w, b)),
    "rms_norm": ("r3,4 r4", lambda x, w: F.rms_norm(x, (4,), w)),
    "group_norm": ("r3,4,2 r4 r4", lambda x, w, b: F.group_norm(x, 2, w, b)),
    "group_norm plain": ("r3,4,2,2", lambda x: F.group_norm(x, 2)),
    "torch.group_norm": ("r3,4,2 r4 r4", lambda x, w, b: torch.group_norm(x, 2, w, b)),
    "instance_norm": ("r3,4,5 r4 r4", lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "batch_norm train": ("r5,3 r3 r3", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "batch_norm eval": ("r5,3 r3 r3", lambda x, w, b: F.batch_norm(x, torch.zeros_like(w), torch.ones_like(w), w, b)),
    "BatchNorm1d": ("r5,3 r", from_module(lambda: nn.BatchNorm1d(3))),
    "normalize": ("r3,4", F.normalize),
    "weight_norm (utils)": ("r3,3 r", normalized(torch.nn.utils.weight_norm)),
    "weight_norm (parametrizations)": ("r3,3 r", normalized(parametrizations.weight_norm)),
    "torch._weight_norm": ("r3,4 r3,1", lambda v, g: torch._weight_norm(v, g, 0)),
    "torch._weight_norm dim 1": ("r3,4 r1,4", lambda v, g: torch._weight_norm(v, g, 1)),
    "torch._weight_norm dim -1": ("r3,4 p", lambda v, g: torch._weight_norm(v, g, -1)),
    "spectral_norm (parametrizations)": (
        "r3,3 r",
        from_module(lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), mode="eval"),
    ),
    "orthogonal (parametrizations)": ("r3,3 r", from_module(lambda: parametrizations.orthogonal(nn.Linear(3, 3)))),
}

ATTENTION: Operators = {
    "sdpa": (QKV, F.scaled_dot_product_attention),
    "sdpa causal": (QKV, partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3)),
    "sdpa boolean mask": (QKV, partial(F.scaled_dot_product_attention, attn_mask=MASK)),
    "sdpa learned mask": (f"{QKV} r3,3", F.scaled_dot_product_attention),
    "sdpa dropout": (QKV, seeded(partial(F.scaled_dot_product_attention, dropout_p=0.5))),
    "sdpa grouped queries": ("r1,4,3,4 r1,2,3,4 r1,2,3,4", partial(F.scaled_dot_product_attention, enable_gqa=True)),
    "multi_head_attention_forward": ("r3,1,4 r12,4 r4,4", attention(need_weights=False)),
    "multi_head_attention_forward weights": ("r3,1,4 r12,4 r4,4", attention()),
    "MultiheadAttention": ("r3,1,4 r", from_module(building.SelfAttention)),
    "MultiheadAttention eval": ("r3,1,4 r", from_module(building.SelfAttention, mode="eval")),
    "TransformerEncoderLayer": ("r3,1,4 r", from_module(lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.1))),
    "TransformerEncoderLayer eval": (
        "r3,1,4 r",
        from_module(lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), mode="eval"),
    ),
    "TransformerDecoderLayer": ("r3,1,4 r", from_module(building.Decoder)),
}


def _bags(choice: Tensor, mode: str, weight: Tensor) -> Tensor:
    """Return what is in three bags, of which the last two are empty at times."""
    flat = choice.flatten()
    return F.embedding_bag(flat, weight, torch.tensor([0, 1, 1]).clamp_max(len(flat)), mode=mode)


LAYERS: Operators = {
    "linear": ("r3,4 r2,4 r2", F.linear),
    "bilinear": ("r3,4 r3,2 r2,4,2 r2", F.bilinear),
    "conv2d": ("r1,2,4,4 r2,1,2,2 r2", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2)),
    "conv_transpose2d": ("r1,2,3,3 r2,2,2,2 r2", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2)),
    "unfold": ("r1,2,3,3", lambda x: F.unfold(x, 2)),
    "max_pool2d": ("r1,2,4,4", lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": ("r1,2,4,4", lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool2d": ("r1,2,4,4", lambda x: F.adaptive_avg_pool2d(x, 3)),
    "embedding": ("r4,3", lambda w: F.embedding(CHOICE, w)),
    "embedding padding": ("r4,3", lambda w: F.embedding(CHOICE, w, padding_idx=1, scale_grad_by_freq=True)),
    "embedding_bag": ("r4,3", lambda w: F.embedding_bag(CHOICE, w)),
    "embedding_bag sum": ("r4,3 r2,2", lambda w, p: F.embedding_bag(CHOICE, w, mode="sum", per_sample_weights=p)),
    "embedding_bag max": ("r4,3", lambda w: F.embedding_bag(CHOICE, w, mode="max")),
    **{f"embedding_bag {mode} offsets": ("r4,3", partial(_bags, CHOICE, mode)) for mode in ("mean", "max")},
    **{f"embedding_bag {mode} of nothing": ("r4,3", partial(_bags, CHOICE[:0], mode)) for mode in ("mean", "max")},
    "dropout": ("r3,4", seeded(F.dropout)),
    "dropout2d": ("r2,3,2,2", seeded(F.dropout2d)),
    "alpha_dropout": ("r3,4", seeded(lambda x: F.alpha_dropout(x, training=True))),
    "interpolate bilinear": ("r1,1,3,3", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    **{f"grid_sample {mode}": ("r1,1,4,4 u1,2,2,2", partial(sampled, mode)) for mode in ("nearest", "bicubic")},
    "grid_sample": ("r1,1,4,4 u1,2,2,2", partial(sampled, "bilinear")),
    "grid_sample 3d": ("r1,1,3,3,3 u1,2,2,2,3", partial(sampled, "bilinear")),
    "pad reflect 2d": ("r1,2,3,3", lambda x: F.pad(x, (1, 2, 1, 1), mode="reflect")),
    "RNN": ("r3,1,2 r", from_module(lambda: nn.RNN(2, 3), select=lambda y: y[0])),
    "LSTM": ("r3,1,2 r", from_module(lambda: nn.LSTM(2, 3), select=lambda y: y[0])),
    "GRU": ("r3,1,2 r", from_module(lambda: nn.GRU(2, 3), select=lambda y: y[0])),
    "LSTMCell": ("r3,2 r", from_module(lambda: nn.LSTMCell(2, 3), select=lambda y: y[0])),
}
