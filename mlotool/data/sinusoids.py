"""Few-shot regression: each sample is a task of its own, a sine wave with another amplitude and phase."""

from dataclasses import dataclass
from math import pi

import numpy as np
import torch

from mlotool.core.settings import Count, Rounds, Shape, target
from mlotool.data.splits import AbstractShapedData, InMemoryTensors, drawn

# t: tasks, k: points


@target("data")
@dataclass(eq=False)
class SinusoidEpisodes(AbstractShapedData[InMemoryTensors]):
    """Tasks `y = a sin(x - b)` with amplitude a ~ U(0.1, 5), phase b ~ U(0, pi) and points x ~ U(-5, 5).

    A sample is a task, `{"support": {"input": (k, 1), "target": (k, 1)}, "query": ..}` float32, `"amplitude"` and
    `"phase"`; a batch has the tasks along its first axis.

    Args:
        sizes: number of tasks by split name.
        num_classes: 1, the number of outputs; it stands in the configuration so that models can refer to it.
        image_shape: (1,), the shape of one input; likewise.
        num_support: points that a task is learned from.
        num_query: points that the result is judged by.
        seed: of tasks and points; a split's tasks do not depend on the other splits' sizes.

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
        values = [torch.from_numpy(array).to(torch.float32) for array in (x, y, amplitude, phase)]
        return InMemoryTensors(
            {
                "support": {"input": values[0][:, : self.num_support], "target": values[1][:, : self.num_support]},
                "query": {"input": values[0][:, self.num_support :], "target": values[1][:, self.num_support :]},
                "amplitude": values[2],
                "phase": values[3],
            }
        )
