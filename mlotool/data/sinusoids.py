"""Few-shot regression: each sample is a task of its own, a sine wave with another amplitude and phase."""

from collections.abc import Mapping
from math import pi

import numpy as np
import torch

from mlotool.core.settings import Count, Rounds, Seed, Shape, Whole, target
from mlotool.data.splits import AbstractData, InMemoryTensors, check_literal, drawn

# t: tasks, k: points


@target("data")
class SinusoidEpisodes(AbstractData[InMemoryTensors]):
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

    def __init__(
        self,
        sizes: Mapping[str, Whole],
        num_classes: Count = 1,
        image_shape: Shape = (1,),
        num_support: Rounds = 10,
        num_query: Rounds = 10,
        seed: Seed = 0,
    ) -> None:
        check_literal("num_classes", num_classes, 1, "as a task's output is one number")
        check_literal("image_shape", list(image_shape), [1], "as a task's input is one number")
        self.num_classes = 1
        self.image_shape = (1,)
        super().__init__(drawn(sizes, lambda size, name: _draw(size, num_support, num_query, [seed, *name.encode()])))


def _draw(num_tasks: int, num_support: int, num_query: int, seed: list[int]) -> InMemoryTensors:
    generator = np.random.default_rng(seed)
    amplitude = generator.uniform(0.1, 5.0, num_tasks)
    phase = generator.uniform(0.0, pi, num_tasks)
    x = generator.uniform(-5.0, 5.0, (num_tasks, num_support + num_query, 1))
    y = amplitude[:, None, None] * np.sin(x - phase[:, None, None])
    values = [torch.from_numpy(array).to(torch.float32) for array in (x, y, amplitude, phase)]
    return InMemoryTensors(
        {
            "support": {"input": values[0][:, :num_support], "target": values[1][:, :num_support]},
            "query": {"input": values[0][:, num_support:], "target": values[1][:, num_support:]},
            "amplitude": values[2],
            "phase": values[3],
        }
    )
