"""Running statistics taken anew before an evaluation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mlotool.config import Built
from mlotool.config.building import derived_seed
from mlotool.config.user_data import split_of
from mlotool.core.errors import ConfigError
from mlotool.program import Stream
from mlotool.spaces.shared.shared_space import SharedSpace

PURPOSE = "recalibrate"


@dataclass(frozen=True)
class Recalibration:
    """The running mean and variance of each layer, as averages over some batches, for the time of an evaluation.

        mean = 1/n sum_i mean_i,   var = 1/n sum_i var_i,   over the batches i = 1..n

    Layers that have such statistics are in train mode meanwhile, the others in eval mode, so that the averages are of
    what the evaluation computes. Everything is put back.

    Args:
        batches: gives the batches, the same ones each time.
        seed: of random numbers that are drawn meanwhile.

    Source: Guo et al. 2020, Single Path One-Shot (arXiv 1904.00420), section 3.3; Izmailov et al. 2018 (arXiv
    1803.05407), section 3.2.
    """

    batches: Callable[[], Iterator[Any]]
    seed: int

    @contextmanager
    def applied(self, module: nn.Module, call: Callable[[Any], Any]) -> Iterator[None]:
        """Evaluate with them inside the block.

        Args:
            module: whose layers have the statistics.
            call: runs the module on a batch, as the evaluation does.
        """
        layers = layers_with_statistics(module)
        # The layers' own are left alone: a recorded step, whose backward pass is still to come, has kept them.
        own = [dict(layer.named_buffers(recurse=False)) for layer in layers]
        try:
            for layer, buffers in zip(layers, own, strict=True):
                layer._buffers.update({name: buffer.detach().clone() for name, buffer in buffers.items()})
            self._take(module, layers, call)
            yield
        finally:
            for layer, buffers in zip(layers, own, strict=True):
                layer._buffers.update(buffers)

    @torch.no_grad()
    def _take(self, module: nn.Module, layers: list[_NormBase], call: Callable[[Any], Any]) -> None:
        modes = [(each, each.training) for each in module.modules()]
        momenta = [layer.momentum for layer in layers]
        devices = {each.device for each in module.buffers() if each.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(self.seed)
            try:
                module.eval()
                for layer in layers:
                    layer.reset_running_stats()
                    # A cumulative average.
                    layer.momentum = None
                    layer.training = True
                for batch in self.batches():
                    call(batch)
            finally:
                for layer, momentum in zip(layers, momenta, strict=True):
                    layer.momentum = momentum
                for each, training in modes:
                    each.training = training


def layers_with_statistics(module: nn.Module) -> list[_NormBase]:
    """Return the layers of a module that keep running statistics: BatchNorm, and InstanceNorm where it tracks them."""
    return [each for each in module.modules() if isinstance(each, _NormBase) and each.running_mean is not None]


def make_recalibration(config: Any, built: Built, device: Any = "cpu") -> Recalibration | None:
    """Return what `evaluate.recalibrate` asks for; None where it asks for nothing.

    Args:
        config: a checked config, which evaluates something.
        built: what it describes.
        device: where the evaluated module is.

    Raises:
        ConfigError: the module has no running statistics, or its problem has no stream.
    """
    name, count = config.evaluate.problem, config.evaluate.get("recalibrate")
    if count is None:
        return None
    problem, layers = built.program.problems[name], layers_with_statistics(built.program.problems[name].module)
    if not layers:
        raise ConfigError(
            f"evaluate.recalibrate: found {count}, while the module of the problem '{name}' has no layer with running "
            "statistics; expected BatchNorm, or InstanceNorm with track_running_stats. Leave recalibrate out."
        )
    if isinstance(problem.module, SharedSpace) and problem.module.has_path_statistics:
        raise ConfigError(
            f"evaluate.recalibrate: found {count}, while each path of the shared space of '{name}' has running "
            "statistics of its own (statistics: path); expected one of the two. Leave recalibrate out, or write "
            f"problems.{name}.module.statistics=shared."
        )
    source = config.problems[name]
    while source.same_batch_as is not None:
        source = config.problems[source.same_batch_as]
    if source.stream is None or problem.shards is not None:
        what = "no stream of its own" if source.stream is None else "a module in shards (shard: true)"
        raise ConfigError(
            f"evaluate.recalibrate: found {count}, while the problem '{name}' has {what}; expected a stream whose "
            "batches a whole module takes its running statistics of. Leave recalibrate out."
        )
    settings = source.stream
    dataset, seed = (
        split_of("evaluate.recalibrate", built.data, settings.split),
        derived_seed(config.seed, PURPOSE, name),
    )

    def batches() -> Iterator[Any]:
        stream = Stream(dataset, settings.batch_size, seed=seed, shuffle=settings.shuffle, drop_last=settings.drop_last)
        stream.to(device)
        return (stream.next() for _ in range(count))

    return Recalibration(batches, seed)
