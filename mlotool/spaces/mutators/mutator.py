"""What a mutator is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown

if TYPE_CHECKING:
    from mlotool.spaces.model_graph import ModelGraph


class AbstractMutator(ABC):
    """Changes the graph of a model where its decisions say so.

    A mutator of your own has a `name`, and `mutate`, which finds its places (`graph.find`), decides (`choose`) and
    changes them by the operations of the graph: `replace`, `insert`, `delete`, `connect`, `create`, `call`, `repeat`.

    Attributes:
        name: begins the names of its decisions and of its nodes.

    Example:
        >>> class Drop(AbstractMutator):
        ...     '''Leaves layers out.'''
        ...     def __init__(self, name, at):
        ...         self.name, self.at = name, at
        ...     def mutate(self, graph):
        ...         for number, place in enumerate(graph.find(self.at)):
        ...             if choose(f"{self.name}_{number}", ["keep", "drop"]) == "drop":
        ...                 graph.delete(place)
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> Space(base, [Drop("drop", "1")], inputs=[2], decisions={"drop_0": "drop"})
        Space(
          (0): Linear(in_features=2, out_features=2, bias=True)
        )
    """

    name: str
    factories: ClassVar[tuple[str, ...]] = ("candidates",)
    """Settings that are handed over as functions: what they describe is built where it is chosen."""

    @abstractmethod
    def mutate(self, graph: "ModelGraph") -> None:
        """Change the graph."""


def check_candidates(mutator: str, candidates: Any) -> None:
    """Refuse candidates that are none.

    Args:
        mutator: its class, for the message.
        candidates: by name, what makes each; or None, which is no module.

    Raises:
        ConfigError: they have no names, or one is made already.
    """
    if not isinstance(candidates, Mapping):
        raise ConfigError(
            f"{mutator}: found candidates={shown(candidates)}; expected a mapping from names to what makes a module. "
            "Write candidates: {relu: null, tanh: {_target_: torch.nn.Tanh}}."
        )
    for name, build in candidates.items():
        if build is not None and (isinstance(build, nn.Module) or not callable(build)):
            raise ConfigError(
                f"{mutator}: found {shown(build)} as the candidate {shown(name)}; expected what makes a module, such "
                "as torch.nn.Tanh or functools.partial(torch.nn.Conv2d, kernel_size=5), or None. Correct it."
            )
