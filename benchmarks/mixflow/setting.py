"""One point of the comparison: a task, a way to differentiate it, and the sizes of the model."""

from dataclasses import asdict, dataclass, replace
from typing import Any

TASKS = ("maml", "learning_rate", "weighting")
PRODUCTS = ("reverse", "forward")


@dataclass(frozen=True)
class Way:
    """How second-order products are taken.

    Args:
        product: "reverse" or "forward".
        remat: whether the model's blocks are evaluated again.
        keeps_graphs: of unrolled steps: the graph of each gradient is kept from the step on.
        saves_gradients: of unrolled steps: forward products find the gradient of each step with it.
    """

    product: str = "reverse"
    remat: bool = False
    keeps_graphs: bool = False
    saves_gradients: bool = True

    @property
    def name(self) -> str:
        """In tables."""
        return self.product + (" + remat" if self.remat else "")


WAYS = tuple(Way(product, remat) for product in PRODUCTS for remat in (False, True))
"""The four ways of the comparison."""
BEFORE = "before"
"""The name of the engine before this work, which had reverse products alone."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches; the defaults are those of the tables.

    Args:
        num_layers: blocks.
        width: of the stream that blocks add to.
        hidden: width inside a feedforward; None: four times `width`.
        num_heads: of each attention.
        kv_size: of one head; None: `width / num_heads`.
        vocabulary_size: number of token ids.
        length: tokens of a text.
        batch_size: texts of a batch.
    """

    num_layers: int = 8
    width: int = 32
    hidden: int | None = None
    num_heads: int = 4
    kv_size: int | None = None
    vocabulary_size: int = 64
    length: int = 64
    batch_size: int = 8


@dataclass(frozen=True)
class Setting:
    """One point of the comparison.

    Args:
        task: what the upper problem learns: the start ("maml"), a learned rate for each parameter tensor
            ("learning_rate") or a weight for each text of the batch ("weighting").
        algorithm: "unrolled", or "implicit": a Neumann series with two Hessian products, and a cross product.
        optimizer: of the lower steps, "sgd" or "adam".
        way: how products are taken.
        sizes: of the model and its batches.
        model: "plain", a transformer of standard layers that every engine can run; or "decoder", `mlotool.models`'.
        num_steps: T, lower steps before the hypergradient.
        precision: "fp32" or "bf16".
        device: "cpu" or "cuda".
        dtype: of parameters, by torch's name.
    """

    task: str = "maml"
    algorithm: str = "unrolled"
    optimizer: str = "sgd"
    way: Way = Way()
    sizes: Sizes = Sizes()
    model: str = "plain"
    num_steps: int = 2
    precision: str = "fp32"
    device: str = "cpu"
    dtype: str = "float32"

    def by(self, way: Way) -> "Setting":
        """Return the same, differentiated in another way."""
        return replace(self, way=way)

    def sized(self, **sizes: Any) -> "Setting":
        """Return the same of other sizes."""
        return replace(self, sizes=replace(self.sizes, **sizes))

    @property
    def title(self) -> str:
        """Task, algorithm and optimizer."""
        return f"{self.algorithm}, {self.task}, {self.optimizer}"

    def record(self) -> dict[str, Any]:
        """Return what a result file says of it."""
        return asdict(self)
