"""What binds neighboring stages: penalties, multipliers and their steps, as pure functions of tensors."""

import torch
from torch import Tensor

# s: samples of a batch, ...: the shape of a state


def local_loss(state: Tensor, variable: Tensor, multiplier: Tensor | None, beta: float, weight: float) -> Tensor:
    """Return the loss that stage k < K - 1 is trained by: `c (beta norm(lambda - X)^2 + <kappa, X>)`.

    Its derivative with respect to X is that of the augmented Lagrangian's term
    `c (beta norm(lambda - X)^2 - <kappa, lambda - X>)`.

    Args:
        state: X, (s, ...), where stage k ends.
        variable: lambda_{k+1}, (s, ...), where stage k + 1 begins; held fixed.
        multiplier: kappa_{k+1}, (s, ...); None is zero: the penalty method.
        beta: the penalty coefficient.
        weight: c, 1 for a sum over all elements, 1 / (number of elements) for a mean.

    Returns:
        A tensor of one number, ().

    Source: Sun et al. 2021, Layer-Parallel Training of Residual Networks with Auxiliary-Variable Networks, eq. 20, 22.

    Example:
        >>> local_loss(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2), beta=3.0, weight=0.5)
        tensor(4.)
    """
    total = beta * (state - variable).square().sum()
    if multiplier is not None:
        total = total + (multiplier * state).sum()
    return weight * total


def variable_slope(
    variable: Tensor, state: Tensor, multiplier: Tensor | None, beta: float, weight: float, onward: Tensor
) -> Tensor:
    """Return the derivative of the augmented Lagrangian with respect to lambda_k, (s, ...).

        c (2 beta (lambda_k - X^{k-1}) - kappa_k) + d(loss of stage k)/d lambda_k

    Args:
        variable: lambda_k, (s, ...), where stage k has begun.
        state: X^{k-1}, (s, ...), where stage k - 1 has ended.
        multiplier: kappa_k, (s, ...); None is zero.
        beta: the penalty coefficient.
        weight: c, as in `local_loss`.
        onward: (s, ...), the derivative of the loss of stage k with respect to lambda_k.

    Source: Sun et al. 2021, eq. 23.

    Example:
        >>> one = torch.ones(1, 1)
        >>> variable_slope(2 * one, one, multiplier=None, beta=3.0, weight=0.5, onward=one)
        tensor([[4.]])
    """
    bound = 2.0 * beta * (variable - state)
    if multiplier is not None:
        bound = bound - multiplier
    return weight * bound + onward


def next_multiplier(multiplier: Tensor, variable: Tensor, state: Tensor, rate: float) -> Tensor:
    """Return `kappa - rate (lambda - X)`, the multiplier (s, ...) of the next step.

    Where lambda is stationary, `lambda - X = (kappa - p / c) / (2 beta)`, with p the derivative of the loss of the
    stage that begins at lambda (eq. 17). The rate 2 beta then gives the multiplier `p / c`, at which the violation
    vanishes. The paper prints the rate eta / (2 beta) (eq. 24), the inverse of this.

    Args:
        multiplier: kappa, (s, ...).
        variable: lambda, (s, ...), after its own step.
        state: X, (s, ...), where the stage before has ended.
        rate: step size of the multipliers.

    Source: Sun et al. 2021, eq. 17, 24.

    Example:
        >>> next_multiplier(torch.zeros(1, 1), torch.tensor([[1.5]]), torch.ones(1, 1), rate=2.0)
        tensor([[-1.]])
    """
    return multiplier - rate * (variable - state)


def violations(variable: Tensor, state: Tensor) -> Tensor:
    """Return `norm(lambda - X)` and `norm(X)` over a whole batch, as one tensor (2,).

    Args:
        variable: lambda, (s, ...).
        state: X, (s, ...), where the stage before has ended.

    Example:
        >>> violations(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([1., 1.])
    """
    return torch.stack([torch.linalg.vector_norm(variable - state), torch.linalg.vector_norm(state)])
