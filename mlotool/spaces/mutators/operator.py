"""One operation out of several."""

from collections.abc import Mapping
from typing import Any

from mlotool.spaces.building import Build
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator, check_candidates


class Operator(AbstractMutator):
    """Puts one of several modules in each place.

    Decisions are `<name>_0`, `<name>_1`, .. in the order of the places; with `tied` there is one, `<name>`, for all.

    Args:
        name: of the decisions.
        at: the places; see `Target`.
        candidates: by name, what makes a module; None keeps what stands there. It is given the settings of what stands
            there, as far as it has arguments of such names: `in_channels`, `stride`, ... (see `settings_of`).
        tied: whether all places have the same.

    Source: Zhang et al. 2020, Retiarii, section 3.3 (operator mutator).

    Example:
        >>> from functools import partial
        >>> base = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
        >>> wide = partial(torch.nn.Conv2d, kernel_size=5, padding=2)
        >>> kernel = Operator("kernel", {"type": "Conv2d"}, {"k3": None, "k5": wide})
        >>> Space(base, [kernel], inputs=[3, 8, 8], decisions={"kernel_0": "k5"}).get_submodule("0")
        Conv2d(3, 8, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2))
    """

    def __init__(self, name: str, at: Any, candidates: Mapping[str, Build | None], tied: bool = False) -> None:
        check_candidates("Operator", candidates)
        self.name, self.at, self.candidates, self.tied = name, at, candidates, tied

    def mutate(self, graph: ModelGraph) -> None:
        """Choose, and replace."""
        places = graph.find(self.at, of_some=self.tied)
        for number, place in enumerate(places):
            name = f"{self.name}_{number}"
            for value in graph.alternatives(self.name if self.tied else name, self.candidates):
                build = self.candidates[value]
                if build is not None:
                    graph.replace(place, build, name)
