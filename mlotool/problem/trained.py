"""Whether a module still has the parameters that its problem trains."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

from torch import Tensor, nn

from mlotool.core.errors import RunError
from mlotool.core.unchanged import SameObjects

_CHANGED = (
    "problems.{problem}.module: the parameter '{key}' {change}; expected the parameters that required a gradient when "
    "the problem was made, since its optimizer and what shapes it are made for these. {advice}"
)
_FROZEN = "Give a parameter that is to be held still a group of the optimizer, and set that group's lr to 0."
_ADDED = "Let it require a gradient from the start, in a group of the optimizer whose lr is 0 until then."
_REPLACED = "Put the module together before the problem is made, or write values into the parameter (copy_)."

_REQUIRES_GRAD = attrgetter("requires_grad")
_VALUES = methodcaller("values")  # Of a dict, or what torch.jit puts in its place.


class Trained:
    """Watches the parameters of one problem.

    Args:
        name: the problem's.
        module: its module.
        theta: the parameters that are trained, by name.
    """

    def __init__(self, name: str, module: nn.Module, theta: Mapping[str, Tensor]) -> None:
        self._name, self._module, self._theta = name, module, theta
        places: list[dict[str, Any]] = [each for part in module.modules() for each in (part._parameters, part._modules)]
        self._places = [each for each in places if each]
        self._empty = [each for each in places if not each]
        self._parameters = [*module.parameters()]
        self._buffers = [each._buffers for each in module.modules() if each._buffers]
        self._same = SameObjects(self._look)

    def have_moved(self) -> bool:
        """Say whether submodules, constant parameters or the number of buffers are others than before.

        Raises:
            RunError: so are the parameters that are trained.
        """
        if self._same():
            return False
        now = dict(self._module.named_parameters())
        for key, tensor in self._theta.items():
            if now.get(key) is not tensor:
                change = "is another one" if key in now else "is not there any more"
                raise self._refused(key, f"{change} in the module", _REPLACED)
            if not tensor.requires_grad:
                raise self._refused(key, "does not require a gradient any more", _FROZEN)
        for key, tensor in now.items():
            if tensor.requires_grad and key not in self._theta:
                raise self._refused(key, "requires a gradient, which it did not before", _ADDED)
        return True

    def _look(self) -> Sequence[Any]:
        parts = chain.from_iterable(map(_VALUES, self._places))
        buffers = [value is None for each in self._buffers for value in each.values()]
        # Numbers of few are the same object.
        return [*parts, *map(_REQUIRES_GRAD, self._parameters), *buffers, *map(len, self._empty)]

    def _refused(self, key: str, change: str, advice: str) -> RunError:
        return RunError(_CHANGED.format(problem=self._name, key=key, change=change, advice=advice))
