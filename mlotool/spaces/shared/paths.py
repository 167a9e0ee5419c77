"""Which path a mini-batch takes through a shared space."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from mlotool.core.errors import ConfigError
from mlotool.spaces.shared.path_table import Path, SharedDecision, path_of


class AbstractPaths(nn.Module):
    """Draws paths.

    What it keeps from one draw to the next is a buffer, so that a run that goes on draws what it would have drawn.
    Random numbers are torch's, from its default generator.

    Example:
        >>> class First(AbstractPaths):
        ...     def forward(self, decisions):
        ...         return path_of(decisions, lambda each: each.candidates[0])
        >>> First()([SharedDecision("kernel", ("k3", "k5"))])
        {'kernel': 'k3'}
    """

    def begin(self, decisions: Sequence[SharedDecision]) -> None:
        """Make the buffers for a space with these decisions, if it has any."""

    @abstractmethod
    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path.

        Args:
            decisions: of the space, in the order in which they are asked for.
        """


def number_drawn(drawn: Tensor) -> int:
    """Return a number that was drawn.

    Args:
        drawn: one element.

    Raises:
        ConfigError: there is one for each task.

    Example:
        >>> number_drawn(torch.tensor([2]))
        2
    """
    if is_batchedtensor(drawn):
        raise ConfigError(
            "tasks: found a path that is drawn in a loss of several tasks; expected a mixture there, as torch.vmap "
            "computes all tasks as one program. Set tasks to null, or write mlotool.spaces.PathWeights."
        )
    return int(drawn)


class UniformPaths(AbstractPaths):
    """Draws each decision from its candidates, all with the same probability.

    Source: Guo et al. 2020, Single Path One-Shot Neural Architecture Search (arXiv 1904.00420), section 3.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> UniformPaths()([SharedDecision("kernel", ("k3", "k5"))])
        {'kernel': 'k3'}
    """

    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path."""
        return path_of(decisions, lambda each: each.candidates[number_drawn(torch.randint(len(each.candidates), ()))])


class FairPaths(AbstractPaths):
    """Draws each decision's candidates in turn, in an order that is drawn anew when all have had theirs.

    Of a decision with k candidates, each is taken once in k paths that ask for it, so that all are trained equally
    often.

    Source: Chu et al. 2021, FairNAS (arXiv 1907.01845), section 3.2.

    Example:
        >>> paths, decisions = FairPaths(), [SharedDecision("kernel", ("k3", "k5"))]
        >>> paths.begin(decisions)
        >>> sorted(paths(decisions)["kernel"] for _ in range(4))
        ['k3', 'k3', 'k5', 'k5']

    Attributes:
        left: (decisions, most candidates), bool: which have not had their turn.
    """

    left: Tensor

    def begin(self, decisions: Sequence[SharedDecision]) -> None:
        """Let all candidates be left."""
        most = max((len(each.candidates) for each in decisions), default=0)
        self.register_buffer("left", torch.zeros(len(decisions), most, dtype=torch.bool))

    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path; in evaluation, what is left stays."""
        rows = dict(zip([each.name for each in decisions], self.left.unbind(), strict=True))
        return path_of(decisions, lambda each: each.candidates[self._drawn(rows[each.name], len(each.candidates))])

    def _drawn(self, left: Tensor, count: int) -> int:
        open_ones = left[:count].nonzero().flatten().tolist() or list(range(count))
        found: int = open_ones[number_drawn(torch.randint(len(open_ones), ()))]
        if self.training:
            left[:count] = False
            left[[each for each in open_ones if each != found]] = True
        return found
