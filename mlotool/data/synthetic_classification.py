"""Binary labels of random points, a plane between them: for hyperparameter optimization of logistic regression."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, NonNegative, Seed, Shape, Whole, target
from mlotool.data.splits import AbstractData, InMemoryTensors, check_literal, drawn

# n: samples, d: features

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@target("data")
class SyntheticClassification(AbstractData[InMemoryTensors]):
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

    def __init__(
        self,
        sizes: Mapping[str, Whole],
        num_classes: Count = 2,
        image_shape: Shape = (20,),
        num_informative: Count | None = None,
        noise: NonNegative = 0.1,
        dtype: Literal["float32", "float64"] = "float32",
        seed: Seed = 0,
    ) -> None:
        check_literal("num_classes", num_classes, 2, "as there are two sides of a plane")
        _check_features(image_shape, num_informative)
        self.num_classes = 2
        self.image_shape = tuple(image_shape)
        weight = np.random.default_rng([seed, 0]).standard_normal(image_shape[0])
        if num_informative is not None:
            weight[num_informative:] = 0.0
        self.true_weight = torch.from_numpy(weight).to(DTYPES[dtype])
        super().__init__(
            drawn(sizes, lambda size, name: _draw(size, weight, noise, DTYPES[dtype], [seed, 1, *name.encode()]))
        )


def _draw(size: int, weight: np.ndarray, noise: float, dtype: torch.dtype, seed: list[int]) -> InMemoryTensors:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((size, len(weight)))
    y = x @ weight + noise * generator.standard_normal(size) > 0
    return InMemoryTensors({"input": torch.from_numpy(x).to(dtype), "target": torch.from_numpy(y).long()})


def _check_features(image_shape: Sequence[int], num_informative: int | None) -> None:
    if len(image_shape) != 1:
        raise ConfigError(
            f"data.image_shape={list(image_shape)}; expected [d], the number of features. Set data.image_shape=[20]."
        )
    if num_informative is not None and num_informative > image_shape[0]:
        raise ConfigError(
            f"data.num_informative={num_informative}; expected null or a number from 1 to {image_shape[0]}, the number "
            "of features. Set data.num_informative=null."
        )
