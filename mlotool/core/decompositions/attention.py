"""Attention without fused kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlotool.core.decompositions.precision import in_autocast_dtype
from mlotool.core.errors import ConfigError

_RANDOM = (
    "scaled_dot_product_attention: found dropout_p: {dropout} on a GPU; expected 0, since the kernel of a training "
    "step draws other random numbers there than the one that can be differentiated twice. Set dropout to 0 "
    "in attention, or call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) in training as well."
)


@in_autocast_dtype
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `dropout(softmax(Q K^T / sqrt(d) + mask)) V` by torch's operators for products and softmax.

    Raises:
        ConfigError: dropout would draw other random numbers than in a training step.
    """
    dropout = args[1] if len(args) > 1 else kwargs.get("dropout_p", 0.0)
    if dropout > 0.0 and query.is_cuda and (torch.backends.cuda.flash_sdp_enabled() or _memory_efficient()):
        raise ConfigError(_RANDOM.format(dropout=dropout))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _memory_efficient() -> bool:
    return torch.backends.cuda.mem_efficient_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
