"""What a run changes in its process, and puts back: torch's settings, Lightning's voice, Ctrl-C."""

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape
from mlotool.core.process import frozen, terminable
from mlotool.distributed.collectives import Ranks

# Warnings of Lightning that do not apply to a run of ours, by the beginning of their message.
IRRELEVANT_WARNINGS = (
    r"GPU available but not used",
    r"Checkpoint directory .* exists and is not empty",
    r"Using ModelCheckpoint with manual optimization",
    r"The number of training batches .* is smaller than the logging interval",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextmanager
def own_settings(runner: Any, *, is_first: bool = True) -> Iterator[None]:
    """Let a process be one of runs: torch as told, Lightning quiet, SIGTERM as Ctrl-C.

    Args:
        runner: the config's node.
        is_first: whether the process says what mlotool logs; of several ranks one does.
    """
    settings = {key: runner[key] for key in ("num_threads", "deterministic", "tf32")}
    logged = announcements() if is_first else nullcontext()
    with torch_settings(**settings), quiet_lightning(), terminable(), frozen(), logged:
        yield


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's INFO lines and the warnings that do not apply."""
    # Profilers and summaries, which are asked for, have loggers of their own.
    names = "pytorch_lightning.utilities.rank_zero", "pytorch_lightning.trainer.connectors.checkpoint_connector"
    with warnings.catch_warnings(), ExitStack() as stack:
        for message in IRRELEVANT_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for name in (*names, "lightning_fabric"):
            stack.enter_context(_level(logging.getLogger(name), logging.WARNING))
        yield


@contextmanager
def announcements() -> Iterator[None]:
    """Show on stderr what mlotool logs as INFO, unless the caller's script has set up logging itself."""
    logger, handler = logging.getLogger("mlotool"), logging.StreamHandler()
    if logger.hasHandlers():
        yield
        return
    handler.format = lambda record: f"mlotool: {escape(record.getMessage())}"  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with _level(logger, logging.INFO):
            yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def torch_settings(*, num_threads: int | None, deterministic: bool, tf32: bool) -> Iterator[None]:
    """Set the number of CPU threads (None keeps it), deterministic algorithms and TF32; put all back."""
    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    allowed = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = tf32
    # Importing Lightning sets it; every step of Adam then probes NVML, which costs more than the step.
    probes_nvml = os.environ.pop(_NVML_CHECK, None)
    try:
        yield
    finally:
        if probes_nvml is not None:
            os.environ[_NVML_CHECK] = probes_nvml
        for backend, value in zip(backends, allowed, strict=True):
            backend.allow_tf32 = value
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_BETWEEN_AGREEMENTS = 0.5
MAX_TICKS_BETWEEN_AGREEMENTS = 1000


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Let a function take Ctrl-C and SIGTERM, which is possible in the main thread alone; yield whether it does."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield True
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


class Interrupt:
    """Whether the user, or a cluster that wants its machine back, has asked to stop.

    Lightning's own answer to Ctrl-C exits the process in the middle of a tick, from which no run can go on. A signal
    reaches ranks at different ticks, and one that stopped alone would leave the others waiting: they agree.

    Args:
        ranks: those that stop after the same tick.

    Attributes:
        exit_code: by the shells' custom, 128 and the signal that this process got; 0 where it got none.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.exit_code = 0
        self._ranks = ranks or Ranks()
        self._is_listening = self._is_told = self._is_agreed = False
        self._num_ticks = self._left = 1
        self._began = time.monotonic()

    @property
    def requested(self) -> bool:
        """Whether to stop after the tick at hand."""
        return self._is_told if self._ranks.size == 1 else self._is_agreed

    def seen(self) -> bool:
        """Return the same, once a tick; several ranks ask each other about twice a second."""
        self._left -= 1
        if self._ranks.size > 1 and self._left <= 0:
            seconds = (time.monotonic() - self._began) / self._num_ticks
            flag, seconds = self._ranks.largest([float(self._is_told), seconds])
            self._is_agreed = bool(flag)
            wanted = int(SECONDS_BETWEEN_AGREEMENTS / max(seconds, 1e-9))
            self._num_ticks = self._left = min(max(wanted, 1), MAX_TICKS_BETWEEN_AGREEMENTS)
            self._began = time.monotonic()
        return self.requested

    def listen(self) -> None:
        """Take the signals, where `listening` is open; again once Lightning has put a handler before it."""
        if self._is_listening:
            for number in SIGNALS:
                signal.signal(number, self._take)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let the first signal ask for a stop after the tick at hand, and a second Ctrl-C stop at once."""
        with signals_to(self._take) as self._is_listening:
            try:
                yield
            finally:
                self._is_listening = False

    def _take(self, signum: int, frame: FrameType | None) -> None:
        # Clusters send SIGTERM several times; who presses Ctrl-C twice means it.
        if self._is_told and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._is_told:
            self._is_told, self.exit_code = True, 128 + signum

    def insist(self) -> None:
        """Stop as soon as can be: other ranks cannot be waited for."""
        if self._ranks.size > 1:
            raise KeyboardInterrupt
        self._is_told, self.exit_code = True, self.exit_code or 128 + signal.SIGINT


def count_devices(runner: Any) -> int:
    """Return how many processes `runner.devices` asks for on this machine; `auto` is a GPU each, or one CPU.

    Raises:
        ConfigError: there are not as many GPUs.
    """
    devices = runner.get("devices", 1)
    if devices == 1:
        return 1
    num_gpus = torch.cuda.device_count() if find_device(runner).type == "cuda" else 0
    if devices == "auto":
        return max(num_gpus, 1)
    if 0 < num_gpus < devices:
        raise ConfigError(
            f"runner.devices: found {devices}, but torch sees {num_gpus} GPU(s). Set runner.devices={num_gpus}."
        )
    return int(devices)


def find_device(runner: Any, local_rank: int = 0) -> torch.device:
    """Return the device of `runner.accelerator`; `auto` is a GPU where there is one.

    Args:
        runner: the config's node.
        local_rank: number of this process on its machine, and so of its GPU.

    Raises:
        ConfigError: there is no such device.
    """
    if runner.accelerator == "cpu" or (runner.accelerator == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"runner.accelerator: found {runner.accelerator}, but torch sees no GPU {local_rank}. Set it to cpu."
        )
    return torch.device("cuda", local_rank)
