"""One device: multigrid, which evaluates all chunks of layers at once, against a pass through small layers.

On a GPU small layers are bound by the launches of their kernels, so the pass to beat is one captured as a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.rounds import Cycle, interleave, summarize
from benchmarks.layerparallel.model import Workload
from mlotool.layerparallel import MultigridResidual
from mlotool.models import ResidualLayers

NUM_LAYERS = (64, 256, 1024, 4096)
WIDTH, NUM_SAMPLES, FINAL_TIME = 8, 500, 5.0
MULTIGRID_CYCLES = (2, 6)
"""m1 = m2 = 2 is one-shot training's, from a warm start; the start is cold here, and the error beside the time."""
NUM_CYCLES = 5
SERIAL, GRAPHED = "serial", "{}, CUDA graph"
ONE_STREAM, STREAMS = "stages on one stream", "stages on a stream each"
NUM_STAGES = 4


def compare(device: torch.device, num_layers: int, num_rounds: int, num_cycles: int = NUM_CYCLES) -> dict[str, Any]:
    """Return the times of one gradient of a network of dense layers, and how far multigrid's is from it."""
    layers = _layers(device, num_layers)
    samples = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    rivals: dict[str, Callable[[], Any]] = {SERIAL: _gradient(layers, layers, samples)}
    expected, errors, refused = rivals[SERIAL](), {}, {}
    for cycles in MULTIGRID_CYCLES:
        name = f"multigrid, {cycles} cycles"
        solver = MultigridResidual(layers, relaxation="F", cycles=cycles)
        rivals[name] = _gradient(solver, layers, samples)
        errors[name] = _error(rivals[name](), expected)
    for name in list(rivals) if device.type == "cuda" else ():
        try:
            rivals[GRAPHED.format(name)] = _captured(rivals[name])
        except RuntimeError as reason:
            # Whatever waits for the device cannot be captured; the row says so.
            refused[name] = str(reason.__context__ or reason).splitlines()[0]
    built = {name: _built(rival) for name, rival in rivals.items()}
    found = interleave(built, num_rounds=num_rounds, num_cycles=num_cycles)
    base = GRAPHED.format(SERIAL)
    return {
        "num_layers": num_layers,
        "wall": summarize(found, base if base in rivals else SERIAL, "wall"),
        "error": errors,
        "not_captured": refused,
    }


def compare_streams(device: torch.device, workload: Workload, num_rounds: int) -> dict[str, Any]:
    """Return the times of all stages' passes, each from an input of its own, on one CUDA stream and on several."""
    stages = [stage.to(device) for stage in workload.make_stages(NUM_STAGES)]
    inputs = [next(workload.batches())[0].to(device)]
    for stage in stages[:-1]:
        inputs.append(stage(inputs[-1]).detach().requires_grad_())
    streams = [torch.cuda.Stream(device) for _ in stages]

    def on_one() -> None:
        for stage, given in zip(stages, inputs, strict=True):
            torch.autograd.grad(stage(given).square().mean(), list(stage.parameters()))

    def on_several() -> None:
        current = torch.cuda.current_stream(device)
        for stream, stage, given in zip(streams, stages, inputs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch.autograd.grad(stage(given).square().mean(), list(stage.parameters()))
        for stream in streams:
            current.wait_stream(stream)

    rivals = {ONE_STREAM: _built(on_one), STREAMS: _built(on_several)}
    found = interleave(rivals, num_rounds=num_rounds, num_cycles=NUM_CYCLES)
    return {"num_stages": NUM_STAGES, "wall": summarize(found, ONE_STREAM, "wall")}


def _layers(device: torch.device, num_layers: int) -> ResidualLayers:
    torch.manual_seed(0)
    return ResidualLayers(num_layers, WIDTH, FINAL_TIME, equal_start=True).to(device)


def _gradient(
    forward: Callable[[Tensor], Tensor], layers: ResidualLayers, samples: Tensor
) -> Callable[[], list[Tensor]]:
    parameters = list(layers.parameters())

    def gradient() -> list[Tensor]:
        return list(torch.autograd.grad(forward(samples).square().mean(), parameters))

    return gradient


def _captured(gradient: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph, after the passes on another stream that a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradient()
    torch.cuda.current_stream().wait_stream(side)
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            gradient()
    finally:
        # A capture that fails leaves its own stream in place.
        torch.cuda.set_stream(current)
    return graph.replay


def _built(rival: Callable[[], object]) -> Callable[[], Cycle]:
    def cycle() -> None:
        rival()

    return lambda: cycle


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    found_vector, vector = (torch.cat([each.reshape(-1) for each in parts]) for parts in (found, expected))
    return float((found_vector - vector).norm() / vector.norm())
