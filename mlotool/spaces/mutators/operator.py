"""One of several operations."""

from dataclasses import dataclass
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.settings import target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, Candidates, chosen
from mlotool.spaces.tracing import matches


@target("mutator")
@dataclass(eq=False)
class Operator(AbstractMutator):
    """Puts one of several modules in each place.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places. With `tied: true`, a single decision `<name>`
    holds for all places. With a path in `tied`, places whose ids are equal after that path share a decision: with
    `cells.*`, `cells.0.edges.3` and `cells.1.edges.3` do. Decisions are then numbered in the order of their first
    places.

    Args:
        name: name with which the decisions begin.
        at: the places; see `Target`.
        candidates: by name, a function that makes a module; None keeps the module that is there. The function gets
            those settings of that module for which it has arguments: `in_channels`, `stride`, ... (see `settings_of`).
        tied: whether all places share one decision; or a path, such as `cells.*`, after which the ids of places that
            share a decision are equal.

    Raises:
        ConfigError: a place does not begin with the path in `tied`.

    Source: Zhang et al. 2020, Retiarii, section 3.3 (operator mutator).

    Example:
        >>> from functools import partial
        >>> base = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
        >>> wide = partial(torch.nn.Conv2d, kernel_size=5, padding=2)
        >>> kernel = Operator("kernel", {"type": "Conv2d"}, {"k3": None, "k5": wide})
        >>> Space(base, [kernel], inputs=[3, 8, 8], decisions={"kernel_0": "k5"}).get_submodule("0")
        Conv2d(3, 8, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2))
    """

    name: str
    at: Any
    candidates: Candidates
    tied: bool | str = False

    def mutate(self, graph: ModelGraph) -> None:
        """Decide, and replace the modules."""
        decisions: dict[str, str] = {}
        for number, place in enumerate(graph.find(self.at, of_some=self.tied is True)):
            decision = self.name
            if self.tied is not True:
                key = _behind(place.id, self.tied) if self.tied else str(number)
                decision = decisions.setdefault(key, f"{self.name}_{len(decisions)}")
            for build in chosen(graph, decision, self.candidates):
                graph.replace(place, build, f"{self.name}_{number}")


def _behind(name: str, pattern: str) -> str:
    """Return what follows in an id behind the names that a path stands for."""
    names = name.split(".")
    for count in range(len(names), 0, -1):
        if matches(".".join(names[:count]), pattern):
            return ".".join(names[count:])
    advice = "Write a path with which all places begin, such as 'cells.*' for 'cells.0.edges.3'."
    raise ConfigError(f"tied: found the place '{name}', which does not begin with '{pattern}'. {advice}")
