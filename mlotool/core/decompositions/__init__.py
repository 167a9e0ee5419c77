"""Operators that lack a derivative, or have a wrong one, by operators that have it.

Each function takes what its operator takes, and returns the same to rounding. `FORWARD` is for tangents of gradients,
`TWICE` for double backward. Operators of a loss are found in these tables by what a TorchFunctionMode sees.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core.decompositions import (
    attention,
    bags,
    constants,
    distances,
    dropout,
    linear_algebra,
    losses,
    normalization,
    pointwise,
    sampling,
)

Table = dict[Callable[..., Any], Callable[..., Any]]

TWICE: Table = {
    F.scaled_dot_product_attention: attention.scaled_dot_product_attention,
    torch._weight_norm: normalization.weight_norm,
    F.hardsigmoid: pointwise.hardsigmoid,
    F.multi_margin_loss: losses.multi_margin_loss,
    F.multilabel_margin_loss: losses.multilabel_margin_loss,
    F.embedding_bag: bags.embedding_bag,
}
"""What fails in double backward, or is silently wrong (weight normalization, linear_cross_entropy)."""

# Since torch 2.15.
if hasattr(F, "linear_cross_entropy"):
    TWICE[F.linear_cross_entropy] = losses.linear_cross_entropy

ONCE_IN_OLDER_TORCH: tuple[str, ...] = ()
"""Nodes of operators that this torch differentiates once and a newer one twice; `TWICE` has the operators."""

# 2.9 lacks them, 2.15 has them; in between they do no harm.
if torch.__version__ < "2.15":
    ONCE_IN_OLDER_TORCH = ("Cdist", "Pdist", "GridSampler2D")
    TWICE |= {
        torch.cdist: distances.cdist,
        F.pdist: distances.pdist,
        torch.pdist: distances.pdist,
        F.grid_sample: sampling.grid_sample_twice,
    }

FORWARD: Table = {
    **TWICE,
    F.embedding: bags.embedding,
    torch.embedding: bags.embedding_by_name,
    F.dropout: dropout.dropout,
    torch.dropout: dropout.dropout_by_name,
    torch.dropout_: dropout.dropout_in_place,
    F.silu: pointwise.silu,
    F.mish: pointwise.mish,
    torch.logit: pointwise.logit,
    torch.special.logit: pointwise.logit,
    Tensor.logit: pointwise.logit,
    Tensor.logit_: pointwise.logit_in_place,
    F.group_norm: normalization.group_norm,
    torch.group_norm: normalization.group_norm,
    F.mse_loss: losses.mse_loss,
    F.huber_loss: losses.huber_loss,
    F.soft_margin_loss: losses.soft_margin_loss,
    torch.cdist: distances.cdist,
    F.pdist: distances.pdist,
    torch.pdist: distances.pdist,
    F.grid_sample: sampling.grid_sample,
    torch.masked_scatter: sampling.masked_scatter,
    Tensor.masked_scatter: sampling.masked_scatter,
    Tensor.masked_scatter_: sampling.masked_scatter_in_place,
    torch.scatter_reduce: sampling.scatter_reduce,
    Tensor.scatter_reduce: sampling.scatter_reduce,
    Tensor.scatter_reduce_: sampling.scatter_reduce_in_place,
    torch.prod: pointwise.prod,
    Tensor.prod: pointwise.prod,
    torch.cumprod: pointwise.cumprod,
    Tensor.cumprod: pointwise.cumprod,
    Tensor.data.__get__: constants.data,  # type: ignore[attr-defined]
    Tensor.detach_: constants.detach_in_place,
    torch.detach_: constants.detach_in_place,
    Tensor.numpy: constants.numpy,
    Tensor.__array__: constants.array,
    Tensor.tolist: constants.to_list,
    torch.linalg.solve: linear_algebra.solve,
    torch.linalg.solve_ex: linear_algebra.solve_ex,
    torch.linalg.tensorsolve: linear_algebra.tensorsolve,
    torch.linalg.det: linear_algebra.det,
    torch.det: linear_algebra.det,
    Tensor.det: linear_algebra.det,
    torch.linalg.slogdet: linear_algebra.slogdet,
    torch.slogdet: linear_algebra.slogdet,
    Tensor.slogdet: linear_algebra.slogdet,
    torch.logdet: linear_algebra.logdet,
    Tensor.logdet: linear_algebra.logdet,
    torch.cholesky_inverse: linear_algebra.cholesky_inverse,
    Tensor.cholesky_inverse: linear_algebra.cholesky_inverse,
    torch.triangular_solve: linear_algebra.triangular_solve,
    Tensor.triangular_solve: linear_algebra.triangular_solve,
}
"""Those of `TWICE`, what lacks forward mode, and what is silently wrong in it (`linear_algebra`, products of zeros)."""
