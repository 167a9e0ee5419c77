"""Points of the plane in five classes: the level sets of a smooth function with hills and valleys."""

from dataclasses import dataclass

import numpy as np
import torch

from mlotool.core.settings import Count, Shape, target
from mlotool.data.splits import AbstractShapedData, InMemoryTensors, drawn

# n: samples

# The smallest and the largest value of `peaks` on [-3, 3]^2.
LOWEST, HIGHEST = -6.551133332835839, 8.106213589442339
NUM_CLASSES = 5
BOUND = 3.0


@target("data")
@dataclass(eq=False)
class Peaks(AbstractShapedData[InMemoryTensors]):
    """Points y of [-3, 3]^2 with the class of `peaks(y)`: five bins of equal width from its lowest to its top value.

    Batches are `{"input": (b, 2) float32, "target": (b,) int64, "index": (b,)}`; class 0 is the deepest valley, class
    4 the highest hill.

    Args:
        sizes: number of points by split name; a split's points do not depend on the other splits' sizes.
        num_classes: 5; it stands in the configuration so that models can refer to it.
        image_shape: (2,), the shape of one input; likewise.
        balanced: as many points of each class (to within one), drawn uniformly from its level set, as the code of
            Haber and Ruthotto does; False: uniformly from the square, of which class 2 covers almost three quarters.
        seed: of the points.

    Source: Günther et al. 2020 (arXiv 1812.04352), section 5.1, test case 1, after Haber and Ruthotto 2017, Stable
    Architectures for Deep Neural Networks.

    Example:
        >>> data = Peaks({"train": 100, "val": 20})
        >>> data.split("train")[0]["input"].shape, torch.bincount(data.split("val").values["target"])
        (torch.Size([2]), tensor([4, 4, 4, 4, 4]))
    """

    num_classes: Count = NUM_CLASSES
    image_shape: Shape = (2,)
    balanced: bool = True

    def __post_init__(self) -> None:
        self._check(NUM_CLASSES, [2])
        self._hold(drawn(self.sizes, self._draw_split))

    def _draw_split(self, size: int, name: str) -> InMemoryTensors:
        generator = np.random.default_rng([self.seed, *name.encode()])
        points = _draw_balanced(size, generator) if self.balanced else generator.uniform(-BOUND, BOUND, (size, 2))
        # The class is that of the point as it is handed out.
        points = points.astype(np.float32).astype(np.float64)
        return InMemoryTensors(
            {"input": torch.from_numpy(points).to(torch.float32), "target": torch.from_numpy(level(points))}
        )


def peaks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return MATLAB's function of that name.

    3 (1 - x)^2 exp(-x^2 - (y + 1)^2) - 10 (x/5 - x^3 - y^5) exp(-x^2 - y^2) - 1/3 exp(-(x + 1)^2 - y^2)
    """
    hill = 3 * (1 - x) ** 2 * np.exp(-(x**2) - (y + 1) ** 2)
    valley = 10 * (x / 5 - x**3 - y**5) * np.exp(-(x**2) - y**2)
    return hill - valley - np.exp(-((x + 1) ** 2) - y**2) / 3


def level(points: np.ndarray) -> np.ndarray:
    """Return the class of each of the points (n, 2)."""
    share = (peaks(points[:, 0], points[:, 1]) - LOWEST) / (HIGHEST - LOWEST)
    return np.clip((share * NUM_CLASSES).astype(np.int64), 0, NUM_CLASSES - 1)


def _draw_balanced(size: int, generator: np.random.Generator) -> np.ndarray:
    wanted = [(size + NUM_CLASSES - 1 - label) // NUM_CLASSES for label in range(NUM_CLASSES)]
    pool = np.empty((0, 2))
    # Rejection: the smallest class covers two percent of the square.
    while (np.bincount(level(pool), minlength=NUM_CLASSES) < wanted).any():
        pool = np.concatenate([pool, generator.uniform(-BOUND, BOUND, (20 * size, 2))])
    labels = level(pool)
    points = np.concatenate([pool[labels == label][:count] for label, count in enumerate(wanted)])
    return generator.permutation(points)
