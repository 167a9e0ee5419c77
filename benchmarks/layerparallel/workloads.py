"""The workloads of the part `times`, by name."""

from collections.abc import Callable
from functools import partial

from benchmarks.layerparallel.model import Workload
from benchmarks.layerparallel.perceptron import PerceptronWorkload
from benchmarks.layerparallel.resnet import ResNetWorkload
from benchmarks.layerparallel.transformer import TransformerWorkload
from benchmarks.layerparallel.workload import AbstractWorkload

WORKLOADS: dict[str, Callable[..., AbstractWorkload]] = {
    "residual": partial(Workload, batch_size=32),
    "resnet": ResNetWorkload,
    "transformer": TransformerWorkload,
    "mlp": PerceptronWorkload,
}
