"""A model that grows, one mutation after the other."""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.settings import target
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.places import Place

MAX_STEPS = 1000
_MUTATOR = "expected what makes a mutator of a name and a place, such as mlotool.spaces.Insert. Correct it."


@target("mutator")
class Grow(AbstractMutator):
    """Applies one of several mutators to one of the places, and again to one of the places that there are then.

    Decisions of step 3 are `<name>_3`: which mutator; `<name>_3_place`: the number of the place, of those that there
    are then, in the order of computation; and what that mutator decides, which is called `<name>_3_<mutator>`.

    Args:
        name: of the decisions.
        at: the places; see `Target`. Those that earlier steps have made count, if they are as described.
        mutators: by name, what makes a mutator of a name and of its one place; None does nothing.
        steps: how many.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3; Cai et al. 2018,
    Path-Level Network Transformation (arXiv 1806.02639); Real et al. 2017, Large-Scale Evolution (arXiv 1703.01041).

    Example:
        >>> from functools import partial
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        >>> deepen = partial(Insert, candidates={"linear": torch.nn.Linear})
        >>> grow = Grow("grow", {"type": "Linear"}, {"none": None, "deepen": deepen}, steps=2)
        >>> decisions = {"grow_0": "deepen", "grow_1": "deepen", "grow_1_place": 1}
        >>> [each.id for each in Space(base, [grow], inputs=[2], decisions=decisions).nodes]
        ['input', '0', 'grow_0_deepen_0', 'grow_1_deepen_0', '1', 'output']
    """

    factories: ClassVar[tuple[str, ...]] = ("mutators",)

    def __init__(
        self, name: str, at: Any, mutators: Mapping[str, Callable[..., AbstractMutator] | None], steps: int
    ) -> None:
        if type(steps) is not int or not 0 <= steps <= MAX_STEPS:
            raise ConfigError(
                f"Grow: found steps={shown(steps)}; expected a whole number from 0 to {MAX_STEPS}. Correct it."
            )
        _check_mutators(mutators)
        self.name, self.at, self.mutators, self.steps = name, at, mutators, steps

    def mutate(self, graph: ModelGraph) -> None:
        """Choose a mutator and a place, and let it mutate; `steps` times."""
        for step in range(self.steps):
            name = f"{self.name}_{step}"
            for which in graph.alternatives(name, self.mutators):
                make = self.mutators[which]
                if make is None:
                    continue
                places = graph.find(self.at)
                for number in graph.alternatives(f"{name}_place", range(len(places))):
                    # Each mutator's decisions have names of their own: in a study, one name has one set of candidates.
                    _made(which, make, f"{name}_{which}", places[number]).mutate(graph)


def _check_mutators(mutators: Any) -> None:
    if not isinstance(mutators, Mapping):
        raise ConfigError(
            f"Grow: found mutators={shown(mutators)}; expected a mapping from names to mutators without a name and a "
            "place. Write mutators: {none: null, branch: {_target_: mlotool.spaces.Branch, candidates: ..}}."
        )
    for name in mutators:
        numbered = re.fullmatch(r"(.+)_[0-9]+", str(name))
        if name == "place" or (numbered and numbered[1] in mutators):
            raise ConfigError(
                f"Grow: found a mutator '{name}', whose decisions would have names that others have; expected neither "
                "'place' nor another's name with a number. Rename it."
            )


def _made(which: Any, make: Callable[..., Any], name: str, place: Place) -> AbstractMutator:
    try:
        made = make(name=name, at=place)
    except TypeError as error:
        raise ConfigError(f"Grow: the mutator {shown(which)} cannot be made ({error}); {_MUTATOR}") from error
    if not isinstance(made, AbstractMutator):
        raise ConfigError(f"Grow: found {type(made).__name__} as the mutator {shown(which)}; {_MUTATOR}")
    return made
