"""Peak memory of live tensors, imports and the interpreter excluded."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.rounds import Cycle


def peak_bytes(build: Callable[[], Cycle], *, num_cycles: int = 3, on_cuda: bool = False) -> int:
    """Return the largest number of bytes that torch's allocator had handed out at one moment.

    The rival is built inside the measurement, so parameters, optimizer states and whatever it keeps count, and so
    do buffers that live only inside a kernel. It says nothing about speed: tracing is slow.

    Args:
        build: builds the rival and returns its cycle.
        num_cycles: cycles; the second is the first with optimizer states.
        on_cuda: read the CUDA allocator; else trace the CPU's.
    """
    gc.collect()
    if on_cuda:
        # Workspaces of cuBLAS, and what rivals share, are there before the first is measured.
        _run(build, 1)
        gc.collect()
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(build, num_cycles)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        _run(build, num_cycles)
    return _peak(trace)


def _run(build: Callable[[], Cycle], num_cycles: int) -> None:
    cycle = build()
    for _ in range(num_cycles):
        cycle()


def _peak(trace: profile) -> int:
    # Not the public `events()`: it adds the allocations up by operator and so loses their order.
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler recorded no allocation"
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what the profiler's C++ side prints about a machine without a GPU."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
