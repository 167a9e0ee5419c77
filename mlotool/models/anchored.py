"""A module with a copy of its initial parameters."""

from typing import Any

from torch import Tensor, nn

from mlotool.core.settings import target


@target("module")
class Anchored(nn.Module):
    """A module with a copy of its initial parameters, for losses that keep the parameters near them.

    Args:
        module: any module. Its parameters are copied when it is wrapped, so pretrained ones if it loads such.

    Example:
        >>> anchored = Anchored(nn.Linear(2, 1))
        >>> [tensor.shape for tensor in anchored.start()]
        [torch.Size([1, 2]), torch.Size([1])]
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for index, parameter in enumerate(module.parameters()):
            self.register_buffer(f"start_{index}", parameter.detach().clone())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        return self.module(*args, **kwargs)

    def start(self) -> list[Tensor]:
        """Return the initial parameters, in the order of the module's parameters."""
        return [self.get_buffer(f"start_{index}") for index, _ in enumerate(self.module.parameters())]
