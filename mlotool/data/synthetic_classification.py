"""Binary labels of random points, a plane between them: for hyperparameter optimization of logistic regression."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mlotool.core.arguments import require
from mlotool.core.settings import Count, NonNegative, Shape, target
from mlotool.data.splits import AbstractShapedData, InMemoryTensors, drawn

# n: samples, d: features

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@target("data")
@dataclass(eq=False)
class SyntheticClassification(AbstractShapedData[InMemoryTensors]):
    """Points with labels `y = 1[x w + noise e > 0]`, where w, x and e are standard normal.

    Betty's paper (appendix D.1) names neither n nor d nor the generator but refers to Grazzi et al. 2020; the generator
    and the sizes (1,000 points of 20 features, half of them for the upper level) are those of that paper's published
    code, hypertorch (examples/logistic_regression.ipynb), and of Betty's own example.

    Batches are `{"input": (b, d), "target": (b,) int64, "index": (b,)}`. `true_weight` (d,) is w.

    Args:
        sizes: number of points by split name; a split's points do not depend on the other splits' sizes.
        num_classes: 2; it stands in the configuration so that models can refer to it.
        image_shape: (d,), the shape of one input; likewise.
        num_informative: features whose w is not 0, the first ones; None: all. The others a weight decay for each
            parameter can switch off.
        noise: standard deviation of what is added before the sign is taken.
        dtype: of the inputs, `float32` or `float64`.
        seed: of w, x and e.

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
        self.true_weight = torch.from_numpy(self._weight).to(DTYPES[self.dtype])
        self._check(2, self.image_shape)
        self._hold(drawn(self.sizes, self._draw_split))

    def _draw_split(self, size: int, name: str) -> InMemoryTensors:
        generator = np.random.default_rng([self.seed, 1, *name.encode()])
        x = generator.standard_normal((size, len(self._weight)))
        y = x @ self._weight + self.noise * generator.standard_normal(size) > 0
        return InMemoryTensors(
            {"input": torch.from_numpy(x).to(DTYPES[self.dtype]), "target": torch.from_numpy(y).long()}
        )
