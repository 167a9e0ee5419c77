"""What a run changes in its process, and puts back: torch's settings, Lightning's voice, Ctrl-C."""

import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

# Warnings of Lightning that do not apply to a run of ours, by the beginning of their message.
IRRELEVANT_WARNINGS = (
    r"GPU available but not used",
    r"Checkpoint directory .* exists and is not empty",
    r"The number of training batches .* is smaller than the logging interval",
    # After a Ctrl-C before the first evaluation; a wrong objective is an error of ours.
    r"`ModelCheckpoint\(monitor=.*could not find the monitored key",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's INFO lines and the warnings that do not apply."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in IRRELEVANT_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def torch_settings(*, num_threads: int | None, deterministic: bool) -> Iterator[None]:
    """Set the number of CPU threads (None keeps it) and deterministic algorithms; put both back."""
    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Importing Lightning sets it; every step of Adam then probes NVML, which costs more than the step.
    probes_nvml = os.environ.pop(_NVML_CHECK, None)
    try:
        yield
    finally:
        if probes_nvml is not None:
            os.environ[_NVML_CHECK] = probes_nvml
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)


@contextmanager
def untracked_past() -> Iterator[None]:
    """Keep the garbage collector away from what is there already.

    The modules of torch, Lightning and Hydra hold half a million objects; going through them each time that the
    collected steps of a window look like garbage costs several percent of a run of small ticks.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Interrupt:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def seen(self) -> bool:
        """Say whether to stop after the tick at hand."""
        return self.requested

    def insist(self) -> None:
        """Stop as soon as can be."""
        self.requested = True


@contextmanager
def graceful_interrupt(interrupt: Interrupt) -> Iterator[None]:
    """Let the first Ctrl-C ask for a stop after the tick at hand, and the second one stop at once.

    Lightning's own way exits the process and leaves Ctrl-C disabled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def request(signum: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    signal.signal(signal.SIGINT, request)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
