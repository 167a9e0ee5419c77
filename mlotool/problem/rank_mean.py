"""The mean over ranks, each of which has a part of the batch, as a function that can be differentiated to any order.

A loss is the mean over ranks of `loss_r(theta)`, where theta is the same on all ranks and `loss_r` is evaluated on rank
r's part of the batch. Two functions mark where values enter such an evaluation, and where its results leave it:

    shared  is the identity; its derivative, transposed, is the mean over ranks
    mean    is the mean over ranks; its derivative, transposed, is the identity, since all ranks use the mean alike

Each is the other one's derivative, transposed. So autograd takes a mean over ranks exactly where one is needed, in
derivatives of any order (Shoeybi et al. 2019, arXiv 1909.08053, section 3, where they are called f and g).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Gradient = Sequence[Tensor | None]
# A mean over ranks, of a list of tensors; the identity in one process.
Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def identity_reduce(vector: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `vector`: the mean over one process."""
    return vector


@dataclass(slots=True)
class RankMean:
    """The mean over the ranks of a program.

    All parts of a program hold the same one, so that a program that was made alone can join others.

    Args:
        reduce: exchanges; it need not be differentiable.

    Example:
        >>> [value] = RankMean().mean([torch.tensor(2.0)])  # of one process
        >>> value
        tensor(2.)
    """

    reduce: Reduce = identity_reduce

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, so that nothing is exchanged."""
        return self.reduce is identity_reduce

    def shared(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Return the vector, which is the same on all ranks, for an evaluation on this rank's part of the batch.

        Args:
            vector: any tensors; only those that require a gradient take part in an exchange.
        """
        if self.is_alone or not torch.is_grad_enabled():
            return list(vector)
        shared = iter(_shared(self.reduce, [tensor for tensor in vector if tensor.requires_grad]))
        return [next(shared) if tensor.requires_grad else tensor for tensor in vector]

    def mean(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over ranks of what each has found on its part; derivatives of the result are the same on all.

        Args:
            vector: tensors of the same shapes on all ranks.
        """
        return list(vector) if self.is_alone else _mean(self.reduce, vector)

    def gradient(self, slopes: Gradient, theta: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the mean of what each rank has found; None of a parameter that no rank's loss depends on.

        Which parameters a loss reads may depend on the batch (experts, layers that are skipped), and so on the rank.

        Args:
            slopes: one tensor per parameter; None where it is unused on this rank.
            theta: the parameters.

        Example:
            >>> RankMean().gradient([torch.tensor(2.0), None], [torch.tensor(0.0), torch.tensor(0.0)])
            [tensor(2.), None]
        """
        if self.is_alone or not slopes:
            return list(slopes)
        # The flags are one tensor more in the same exchange, and are read only where something is unused here.
        is_used = [entry is not None for entry in slopes]
        flags = _flags(is_used, theta[0])
        whole = [torch.zeros_like(x) if entry is None else entry for x, entry in zip(theta, slopes, strict=True)]
        *mean, used = self.mean([*whole, flags])
        if all(is_used):
            return [*mean]
        return [value if flag else None for value, flag in zip(mean, (used > 0).tolist(), strict=True)]

    def gradient_of_users(self, slopes: Gradient, theta: Sequence[Tensor], weight: float = 1.0) -> list[Tensor | None]:
        """Return the mean over the ranks that have used a parameter; None of one that no rank has used.

        All ranks first agree on who used what, and then exchange what any rank has used, so they never wait for each
        other. It has no derivative.

        Args:
            slopes: one tensor per parameter, of a loss that was multiplied by `weight`; None where it is unused here.
            theta: the parameters.
            weight: of this rank's batch (`Share.weight`); with 0 it counts as one that has used nothing.

        Source: Zhang et al. 2020, Retiarii, section 5.

        Example:
            >>> RankMean().gradient_of_users([torch.tensor(2.0), None], [torch.tensor(0.0), torch.tensor(0.0)])
            [tensor(2.), None]
        """
        if self.is_alone or not slopes:
            return list(slopes)
        # On the CPU, so that no device is waited for; the weights of all ranks have the mean 1.
        weights = torch.tensor([0.0 if value is None else weight for value in slopes], dtype=torch.float64)
        shares = self.reduce([weights])[0].tolist()
        own = [
            torch.zeros_like(x) if value is None else value
            for x, value, share in zip(theta, slopes, shares, strict=True)
            if share > 0
        ]
        means = iter(self.reduce(own) if own else ())
        return [next(means) / share if share > 0 else None for share in shares]

    def any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return which flags are set on any rank, so that all decide alike.

        Args:
            flags: as many on all ranks.
            device: of the tensors that are exchanged.

        Example:
            >>> RankMean().any([True, False], torch.device("cpu"))
            [True, False]
        """
        if self.is_alone:
            return list(flags)
        return (self.reduce([torch.tensor(flags, dtype=torch.float32, device=device)])[0] > 0).tolist()

    def value(self, function: Callable[..., Tensor], *vectors: Sequence[Tensor]) -> Tensor:
        """Return the mean over ranks of a loss, of which all derivatives are means over ranks too.

        Args:
            function: the loss on this rank's part of the batch, of the vectors.
            vectors: the same on all ranks.
        """
        if self.is_alone:
            return function(*vectors)
        return self.mean([function(*[self.shared(vector) for vector in vectors])])[0]


def _flags(is_used: Sequence[bool], like: Tensor) -> Tensor:
    """Return ones and zeros, of a real type: complex numbers have no order."""
    dtype = like.dtype.to_real()
    if all(is_used):
        # Filled on the device: values of a list are copied there, for which the host would wait in every gradient.
        return torch.ones(len(is_used), dtype=dtype, device=like.device)
    return torch.tensor(is_used, dtype=dtype, device=like.device)


def _shared(reduce: Reduce, vector: Sequence[Tensor]) -> list[Tensor]:
    return list(_Shared.apply(reduce, *vector)) if vector else []


def _mean(reduce: Reduce, vector: Sequence[Tensor]) -> list[Tensor]:
    if not vector:
        return []
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in vector):
        return list(_Mean.apply(reduce, *vector))
    return list(reduce(vector))


class _Shared(torch.autograd.Function):
    """The identity; its transpose is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, reduce: Reduce, *vector: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        return tuple([tensor.view_as(tensor) for tensor in vector])

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Any, ...]:
        return None, *_mean(ctx.reduce, cotangent)


class _Mean(torch.autograd.Function):
    """The mean over ranks; its transpose is the identity."""

    @staticmethod
    def forward(ctx: Any, reduce: Reduce, *vector: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        return tuple(reduce(vector))

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Any, ...]:
        return None, *(_shared(ctx.reduce, cotangent) if torch.is_grad_enabled() else cotangent)


def mean_gradient(slopes: Sequence[Gradient], theta: Sequence[Tensor], ranks: RankMean) -> list[Tensor | None]:
    """Return the mean over batches and ranks, as a function of what the gradients on the batches depend on.

    A parameter that no batch's loss depends on, on any rank, has None as its mean, as for the optimizer.

    Args:
        slopes: by batch, this rank's: one tensor per parameter; None where it is unused.
        theta: the parameters.
        ranks: their mean.
    """
    if len(slopes) == 1:
        return ranks.gradient(list(slopes[0]), theta)
    used = [any(slope is not None for slope in entries) for entries in zip(*slopes, strict=True)]
    total: list[Tensor] = []
    for batch in slopes:
        whole = [torch.zeros_like(x) if entry is None else entry for x, entry in zip(theta, batch, strict=True)]
        total = list(torch._foreach_add(total, whole)) if total else whole
    mean = [entry / len(slopes) if flag else None for entry, flag in zip(total, used, strict=True)]
    return ranks.gradient(mean, theta)
