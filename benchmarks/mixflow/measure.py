"""Memory and CPU time of one hypergradient of a setting; a process calls these for its version of the engine."""

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.harness.memory import peak_bytes
from benchmarks.mixflow.programs import LOWER, UPPER, build
from benchmarks.mixflow.setting import Setting
from mlotool import Program, Schedule
from tests.live_storage import LiveStorage


@dataclass(frozen=True)
class Memory:
    """Bytes, of one hypergradient after the lower steps that led to it.

    Args:
        peak: the most that lived at once while it was taken.
        static: what lives before: parameters, optimizer states, batches and the record of the steps.
    """

    peak: int
    static: int

    @property
    def dynamic(self) -> int:
        """What the hypergradient itself adds (Kemaev et al. 2025, Eq. 10)."""
        return self.peak - self.static


def memory(setting: Setting) -> Memory:
    """Return what one hypergradient takes, the second of its program: by counting storages, or by CUDA's allocator."""
    gc.collect()
    if setting.device == "cuda":
        start = torch.cuda.memory_allocated()
        program = _after_steps(setting)
        gc.collect()
        torch.cuda.synchronize()
        static = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        program.gradient(UPPER)
        torch.cuda.synchronize()
        return Memory(torch.cuda.max_memory_allocated() - start, static - start)
    with LiveStorage() as live:
        program = _after_steps(setting)
        gc.collect()
        static = live.now
        live.reset_peak()
        program.gradient(UPPER)
    return Memory(live.peak, static)


def counted_and_allocated(setting: Setting) -> tuple[int, int]:
    """Return the peak from building the program to its first hypergradient: of storages, and of allocator events."""
    with LiveStorage() as live:
        _hypergradient(setting)()
    return live.peak, peak_bytes(lambda: _hypergradient(setting), num_cycles=1)


def gradient(setting: Setting) -> np.ndarray:
    """Return the hypergradient as one vector."""
    found = _after_steps(setting, is_warm=False).gradient(UPPER)
    return torch.cat([each.flatten() for each in found.values()]).detach().cpu().numpy()


def start(name: str, setting: Setting) -> None:
    """Build a program, for `go_on` to take hypergradients of."""
    program = _after_steps(setting)
    _running[name] = lambda: program.gradient(UPPER)
    gc.collect()


def start_cycles(name: str, setting: Setting) -> None:
    """Build a program, for `go_on` to train: the lower steps and the upper one, hypergradient included."""
    schedule = Schedule(build(replace(setting, num_steps=setting.num_steps - 1)))

    def cycle() -> None:
        for _ in range(setting.num_steps):
            schedule.tick()

    cycle()
    cycle()
    _running[name] = cycle
    gc.collect()


def start_steps(name: str, setting: Setting) -> None:
    """Build a program, for `go_on` to take its steps and a hypergradient, without the upper step."""
    program = _after_steps(setting)

    def again() -> None:
        program.problems[LOWER].trajectory.clear()
        _take_steps(program, setting)
        program.gradient(UPPER)

    _running[name] = again
    gc.collect()


def go_on(name: str, num_cycles: int) -> tuple[float, float]:
    """Return the wall and the CPU seconds of that many hypergradients or cycles."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_cycles):
        _running[name]()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def stop() -> None:
    """Forget what was started."""
    _running.clear()
    gc.collect()


_running: dict[str, Callable[[], object]] = {}


def _hypergradient(setting: Setting) -> Callable[[], None]:
    def first() -> None:
        _after_steps(setting, is_warm=False).gradient(UPPER)

    return first


def _after_steps(setting: Setting, *, is_warm: bool = True) -> Program:
    """Return a program after its lower steps.

    Args:
        setting: of the program.
        is_warm: whether it has taken a hypergradient, and the steps again, so that what the first one looks at and
            keeps is there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that a comparison takes on purpose
        program = build(setting)
        _take_steps(program, setting)
        if is_warm:
            program.gradient(UPPER)
            program.problems[LOWER].trajectory.clear()
            _take_steps(program, setting)
    return program


def _take_steps(program: Program, setting: Setting) -> None:
    schedule = Schedule(program)
    for _ in range(setting.num_steps):
        schedule.tick()
    trajectory = program.problems[LOWER].trajectory
    if setting.way.saves_gradients or setting.algorithm != "unrolled":
        return
    records = [replace(record, gradient=None) for record in trajectory]
    trajectory.clear()
    for record in records:
        trajectory.append(record)
