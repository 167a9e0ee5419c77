"""The model of how much faster layer-parallel training is, from the parts of a batch's time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSeconds:
    """How long the parts of a batch take: seconds, or any other unit that all share, on the same number of threads.

    Args:
        forward: T_f, the forward pass of the whole module.
        backward: T_b, its backward pass and the optimizer's step.
        data: T_d, loading the batch, which every rank does.
        penalty: t_psi, what a rank computes for the method alone: the penalty at the end of its stage, and the step of
            its auxiliary variable.
        auxiliary: t_f + t_b, the forward pass and the distillation of an auxiliary network; 0 for stored variables.

    Source: Sun et al. 2021, arXiv 2112.05387, equation 27.

    Example:
        >>> seconds = BatchSeconds(forward=1.0, backward=2.0, auxiliary=0.5)
        >>> seconds.serial, seconds.bound
        (3.0, 6.0)
    """

    forward: float
    backward: float
    data: float = 0.0
    penalty: float = 0.0
    auxiliary: float = 0.0

    @property
    def serial(self) -> float:
        """T = T_d + T_f + T_b, the time of a batch of serial training."""
        return self.data + self.forward + self.backward

    @property
    def bound(self) -> float:
        """The speed-up that no number of stages exceeds: T / (T_d + t_psi + t_f + t_b); infinite for a divisor of 0."""
        added = self.data + self.penalty + self.auxiliary
        return self.serial / added if added else float("inf")


def predicted_speedup(seconds: BatchSeconds, num_stages: int) -> float:
    """Return the speed-up over serial training that K stages of equal cost reach if communication is free.

        rho = 1 / [ (1/K) (T_f + T_b) / T + (T_d + t_psi + t_f + t_b) / T ],   T = T_d + T_f + T_b

    Args:
        seconds: the parts.
        num_stages: K, one rank each.

    Returns:
        rho.

    Source: Sun et al. 2021, Layer-parallel training of residual networks with auxiliary-variable networks, arXiv
    2112.05387, equation 27.

    Example:
        >>> round(predicted_speedup(BatchSeconds(forward=1.0, backward=2.0, auxiliary=0.5), num_stages=3), 3)
        2.0
    """
    stages = (seconds.forward + seconds.backward) / num_stages
    return seconds.serial / (stages + seconds.data + seconds.penalty + seconds.auxiliary)
