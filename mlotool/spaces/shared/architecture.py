"""What decides between the candidates of a shared space: parameters of an upper problem."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import target
from mlotool.spaces.decisions import Value, deciding
from mlotool.spaces.shared.paths import SharedDecision, number_drawn, path_of
from mlotool.spaces.shared.shared_graph import Mixture
from mlotool.spaces.shared.shared_space import SharedSpace

Rule = Callable[[Mapping[str, Sequence[Value]], Mapping[str, Tensor]], Mapping[str, Value]]
"""Candidates and their probabilities by decision in, the candidate of each decision out."""


class AbstractArchitecture(nn.Module):
    """A distribution over the candidates of each decision of a shared space, given by logits of its own.

    Args:
        space: makes the space; in a recipe `${problems.NAME.module}`.
        scale: standard deviation of the logits at the start.
        rule: returns what a search has found, a candidate for each decision; it is called with the candidates and their
            probabilities, both by decision. None: the most probable candidates.

    Raises:
        ConfigError: what is made is no shared space, or has no decisions.
    """

    table: tuple[SharedDecision, ...]

    factories: ClassVar[tuple[str, ...]] = ("space",)
    """Settings that are handed over as functions: what they describe is built here."""

    def __init__(self, space: Callable[[], SharedSpace], scale: float = 0.0, rule: Rule | None = None) -> None:
        super().__init__()
        self.rule = rule
        with deciding():
            made = space()
        advice = "Write space: ${problems.NAME.module}, with shared: true and mutators in that module."
        is_right = isinstance(made, SharedSpace) and bool(made.table)
        require(is_right, "space", type(made).__name__, "a shared space with decisions", advice)
        self.table = made.table
        self.logits = nn.ParameterDict(
            {decision.name: nn.Parameter(scale * torch.randn(len(decision.candidates))) for decision in self.table}
        )

    def found(self) -> dict[str, Value]:
        """Return the path that the probabilities of the candidates make, by the rule."""
        if self.rule is None:
            return path_of(self.table, lambda decision: decision.candidates[int(self.logits[decision.name].argmax())])
        candidates = {decision.name: decision.candidates for decision in self.table}
        found = self.rule(candidates, {name: each.detach().softmax(0) for name, each in self.logits.items()})
        return path_of(self.table, lambda decision: found[decision.name])

    def entropy(self) -> Tensor:
        """Return the entropy of a decision in nats, mean over decisions, 0-D; log k where k candidates are alike."""
        found = [F.log_softmax(logits, 0) for logits in self.logits.values()]
        return torch.stack([-(each.exp() * each).sum() for each in found]).mean()

    def is_made(self, sure: float) -> bool:
        """Say whether each decision between several candidates has one of at least this probability."""
        several = [logits.detach() for logits in self.logits.values() if len(logits) > 1]
        return bool(several) and bool(torch.stack([each.softmax(0).max() for each in several]).min() >= sure)


@target("module")
class PathWeights(AbstractArchitecture):
    """Weights of all candidates: a space as a mixture, which gradients of the logits pass through.

        y = sum_k softmax(logits)_k candidate_k(x)

    Args: as for `AbstractArchitecture`.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), equation 2.

    Example:
        >>> from mlotool.spaces import Operator
        >>> def space():
        ...     activation = Operator("activation", "1", {"relu": None, "tanh": nn.Tanh})
        ...     return SharedSpace(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()), [activation], inputs=[4])
        >>> weights = PathWeights(space)
        >>> space()(torch.zeros(3, 4), path=weights()).shape, weights.found()
        (torch.Size([3, 2]), {'activation_0': 'relu'})
    """

    def forward(self) -> dict[str, Tensor]:
        """Return a weight for each candidate, by decision; their sum is 1."""
        return {name: each.softmax(0) for name, each in self.logits.items()}


@target("module")
class BinaryPaths(AbstractArchitecture):
    """One candidate a decision, drawn from two that are drawn, with a gradient for the logits of both.

    Two candidates are drawn by their probabilities, without replacement, and one of them by theirs among the two: its
    result is taken. The other one is computed as well, since the gradient of a gate is that of what it lets through;
    memory is that of two paths, whatever the number of candidates.

        y = sum over the two of g_k candidate_k(x),   g = one_hot(drawn),   dg / dlogits := dp / dlogits
        p = softmax(logits of the two)

    In evaluation the most probable candidates are taken.

    Args: as for `AbstractArchitecture`.

    Source: Cai et al. 2019, ProxylessNAS (arXiv 1812.00332), section 3.2, equations 3 and 4. There the logits are
    scaled after a step, so that the probabilities of other candidates stay; here a step changes them as softmax does.

    Example:
        >>> from mlotool.spaces import Operator
        >>> def space():
        ...     activation = Operator("activation", "1", {"relu": None, "tanh": nn.Tanh, "same": nn.Identity})
        ...     return SharedSpace(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()), [activation], inputs=[4])
        >>> drawn = BinaryPaths(space)()["activation_0"]
        >>> len(drawn.candidates), sorted(drawn.weights.tolist())
        (2, [0.0, 1.0])
    """

    has_paths = True

    def forward(self) -> dict[str, Value | Mixture]:
        """Return two candidates, of which one has the weight 1 and the other 0; by decision."""
        return {decision.name: self._drawn(decision) for decision in self.table} if self.training else {**self.found()}

    def _drawn(self, decision: SharedDecision) -> Value | Mixture:
        if len(decision.candidates) == 1:
            return decision.candidates[0]
        logits = self.logits[decision.name]
        two = torch.multinomial(logits.detach().softmax(0), 2)
        numbers = [number_drawn(number) for number in two]
        probability = logits[two].softmax(0)
        number = number_drawn(torch.multinomial(probability.detach(), 1))
        gate = F.one_hot(torch.tensor(number, device=logits.device), 2).to(probability)
        both = tuple(decision.candidates[number] for number in numbers)
        return Mixture(both, gate + probability - probability.detach(), both[number])


@target("module")
class PathPolicy(AbstractArchitecture):
    """Draws a path, and says how probable it was.

    A loss that takes the path is differentiated by the score function (see
    `mlotool.losses.expected_path_cross_entropy`).

    Args: as for `AbstractArchitecture`.

    Source: Pham et al. 2018, ENAS (arXiv 1802.03268), section 2.1; Williams 1992 (REINFORCE). ENAS draws by a recurrent
    network; here each decision has logits of its own.

    Example:
        >>> from mlotool.spaces import Operator
        >>> def space():
        ...     activation = Operator("activation", "1", {"relu": None, "tanh": nn.Tanh})
        ...     return SharedSpace(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()), [activation], inputs=[4])
        >>> path, log_probability = PathPolicy(space)()
        >>> list(path), round(log_probability.item(), 3)
        (['activation_0'], -0.693)
    """

    has_paths = True

    def forward(self) -> tuple[dict[str, Value], Tensor]:
        """Return a path, and the logarithm of its probability, 0-D."""
        terms = []

        def drawn(decision: SharedDecision) -> Value:
            log_probability = F.log_softmax(self.logits[decision.name], 0)
            number = number_drawn(torch.multinomial(log_probability.detach().exp(), 1))
            terms.append(log_probability[number])
            return decision.candidates[number]

        path = path_of(self.table, drawn)
        return path, torch.stack(terms).sum()
