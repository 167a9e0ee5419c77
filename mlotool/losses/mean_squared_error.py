"""Mean squared error of a regression."""

from collections.abc import Mapping

from torch import Tensor

from mlotool.core import BoundModule
from mlotool.core.errors import RunError
from mlotool.core.settings import target


@target("loss")
def mean_squared_error(batch: Mapping[str, Tensor], *, model: BoundModule) -> Tensor:
    """Mean of the squared errors over all samples and outputs.

        C = mean((model(x) - y)^2)

    Args:
        batch: `input` (b, ...) and `target`, of the same shape as the output.
        model: role.

    Returns:
        The loss.

    Raises:
        RunError: output and target differ in shape.
    """
    output, target = model(batch["input"]), batch["target"]
    # Broadcasting (b, 1) against (b,) would silently average over all pairs of samples.
    if output.shape != target.shape:
        raise RunError(
            f"mean_squared_error: the output has shape {tuple(output.shape)}, the target {tuple(target.shape)}; "
            "expected the same shape. Reshape the target in the data, or squeeze the output in the model."
        )
    # Not F.mse_loss: forward-mode differentiation over its backward is not implemented.
    return ((output - target) ** 2).mean()
