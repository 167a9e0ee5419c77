"""Random points: few-shot sine waves, points on two sides of a plane, level sets of a function."""

from dataclasses import dataclass
from math import pi
from typing import Literal

import numpy as np
import torch

from mlotool.core.arguments import require
from mlotool.core.settings import Count, NonNegative, Rounds, Shape, target
from mlotool.data.splits import AbstractShapedData, InMemoryTensors, drawn

# t: tasks, k: points


@target("data")
@dataclass(eq=False)
class SinusoidEpisodes(AbstractShapedData[InMemoryTensors]):
    """Tasks `y = a sin(x - b)` with amplitude a ~ U(0.1, 5), phase b ~ U(0, pi) and points x ~ U(-5, 5).

    A sample is a task, `{"support": {"input": (k, 1), "target": (k, 1)}, "query": .., "amplitude": .., "phase": ..}`,
    in float32. A batch has the tasks along its first axis.

    Args:
        sizes: number of tasks by split name.
        num_classes: 1, the number of outputs; models refer to it in the configuration.
        image_shape: (1,), the shape of one input; models refer to it too.
        num_support: k, points in the support part of a task, from which the task is learned.
        num_query: points in the query part, on which the result is evaluated.
        seed: seed of tasks and points; a split's tasks do not depend on the sizes of other splits.

    Source: Finn et al. 2017, Model-Agnostic Meta-Learning, section 5.1.

    Example:
        >>> data = SinusoidEpisodes({"train": 100, "test": 10})
        >>> data.split("train").__getitems__([0, 1, 2])["support"]["input"].shape
        torch.Size([3, 10, 1])
    """

    num_classes: Count = 1
    image_shape: Shape = (1,)
    num_support: Rounds = 10
    num_query: Rounds = 10

    def __post_init__(self) -> None:
        self._check(1, [1])
        self._hold(drawn(self.sizes, self._draw_split))

    def _draw_split(self, size: int, name: str) -> InMemoryTensors:
        generator = np.random.default_rng([self.seed, *name.encode()])
        amplitude = generator.uniform(0.1, 5.0, size)
        phase = generator.uniform(0.0, pi, size)
        x = generator.uniform(-5.0, 5.0, (size, self.num_support + self.num_query, 1))
        y = amplitude[:, None, None] * np.sin(x - phase[:, None, None])
        inputs, targets, *of_task = (torch.from_numpy(array).to(torch.float32) for array in (x, y, amplitude, phase))
        parts = {"support": slice(self.num_support), "query": slice(self.num_support, None)}
        points = {name: {"input": inputs[:, part], "target": targets[:, part]} for name, part in parts.items()}
        return InMemoryTensors({**points, "amplitude": of_task[0], "phase": of_task[1]})


# n: samples, d: features


@target("data")
@dataclass(eq=False)
class SyntheticClassification(AbstractShapedData[InMemoryTensors]):
    """Points with labels `y = 1[x w + noise e > 0]`, where w, x and e are standard normal.

    The generator and the sizes (1,000 points of 20 features, half of them for the upper level) are those of hypertorch
    (examples/logistic_regression.ipynb), the code of Grazzi et al. 2020, and of Betty's own example. Betty's paper
    (appendix D.1) refers to Grazzi et al. 2020 and does not state them.

    Batches are `{"input": (b, d), "target": (b,) int64, "index": (b,)}`. `true_weight` (d,) is w.

    Args:
        sizes: number of points by split name; a split's points do not depend on the other splits' sizes.
        num_classes: 2; models refer to it in the configuration.
        image_shape: (d,), the shape of one input; models refer to it too.
        num_informative: number of features, the first ones, with a nonzero w; None: all. A separate weight decay for
            each parameter can switch off the others.
        noise: standard deviation of the noise that is added before the sign is taken.
        dtype: dtype of the inputs, `float32` or `float64`.
        seed: seed of w, x and e.

    Example:
        >>> data = SyntheticClassification({"train": 500, "meta": 500})
        >>> data.split("meta")[0]["input"].shape
        torch.Size([20])
    """

    num_classes: Count = 2
    image_shape: Shape = (20,)
    num_informative: Count | None = None
    noise: NonNegative = 0.1
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        require(len(self.image_shape) == 1, "data.image_shape", list(self.image_shape), "[d], the number of features")
        num_features = self.image_shape[0]
        is_right = self.num_informative is None or self.num_informative <= num_features
        require(is_right, "data.num_informative", self.num_informative, f"at most {num_features}, the features")
        self._weight = np.random.default_rng([self.seed, 0]).standard_normal(num_features)
        if self.num_informative is not None:
            self._weight[self.num_informative :] = 0.0
        self.true_weight = torch.from_numpy(self._weight).to(getattr(torch, self.dtype))
        self._check(2, self.image_shape)
        self._hold(drawn(self.sizes, self._draw_split))

    def _draw_split(self, size: int, name: str) -> InMemoryTensors:
        generator = np.random.default_rng([self.seed, 1, *name.encode()])
        x = generator.standard_normal((size, len(self._weight)))
        y = x @ self._weight + self.noise * generator.standard_normal(size) > 0
        return InMemoryTensors(
            {"input": torch.from_numpy(x).to(getattr(torch, self.dtype)), "target": torch.from_numpy(y).long()}
        )


# n: samples

# The smallest and the largest value of `peaks` on [-3, 3]^2.
LOWEST, HIGHEST = -6.551133332835839, 8.106213589442339
NUM_CLASSES = 5
BOUND = 3.0


@target("data")
@dataclass(eq=False)
class Peaks(AbstractShapedData[InMemoryTensors]):
    """Points y of [-3, 3]^2 with the class of `peaks(y)`: five bins of equal width from its minimum to its maximum.

    Batches are `{"input": (b, 2) float32, "target": (b,) int64, "index": (b,)}`; class 0 is the deepest valley, class
    4 the highest hill.

    Args:
        sizes: number of points by split name; a split's points do not depend on the other splits' sizes.
        num_classes: 5; models refer to it in the configuration.
        image_shape: (2,), the shape of one input; models refer to it too.
        balanced: true draws equally many points of each class (to within one), uniformly from its level set, as in the
            code of Haber and Ruthotto. false draws points uniformly from the square, of which class 2 covers almost
            three quarters.
        seed: seed of the points.

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
    """Return the values of MATLAB's function `peaks`.

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
