"""Starts the ranks of a run on this machine, watches them, and ends them together.

The parent only composes the config. Each rank is a `python -m mlotool rank FOLDER` with the environment of torchrun;
the folder has the request, and takes what became of it.
"""

import atexit
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import yaml
from pydantic import TypeAdapter
from pytorch_lightning.plugins.environments import SLURMEnvironment

import mlotool
from mlotool.config import Origin
from mlotool.config.trusted import trusted_packages
from mlotool.core.errors import ConfigError, Interrupted, RunError
from mlotool.core.files import replacing
from mlotool.distributed.collectives import Ranks
from mlotool.runner.folder import RunFolder, plain
from mlotool.runner.process_settings import signals_to


@dataclass(frozen=True)
class World:
    """The place of this process among those of a run.

    Args:
        rank: among all, from 0.
        size: how many there are.
        local_rank: among those of this machine: the number of its GPU.
        local_size: how many this machine has.
        address: of the machine of rank 0.
        port: on it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> "World | None":
        """Return what torchrun, our own launcher or SLURM's srun has set; None where this process is alone.

        Raises:
            ConfigError: only a part of it is set.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            size = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
            return cls._of_slurm(environment, size) if "SLURM_PROCID" in environment and size > 1 else None
        missing = [key for key in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if key not in environment]
        if missing:
            raise ConfigError(
                f"The environment has RANK and WORLD_SIZE, but not {', '.join(missing)}; expected all that torchrun "
                "sets. Start it with torchrun, or clear RANK and WORLD_SIZE."
            )
        values = {"LOCAL_WORLD_SIZE": environment["WORLD_SIZE"], **environment}
        keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        rank, size, local_rank, local_size, port = (int(values[key]) for key in keys)
        return cls(rank, size, local_rank, local_size, values["MASTER_ADDR"], port)

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str], size: int) -> "World":
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
        # "2(x3),1": two tasks on each of three machines, one on the last.
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", str(size)))
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        sizes = [int(count) for count, times in counts for _ in range(int(times or 1))]
        # Jobs that share a machine must not share a port.
        port = 15000 + (int(environment.get("SLURM_JOB_ID", 0)) + int(environment.get("SLURM_STEP_ID", 0))) % 20000
        return cls(
            int(environment["SLURM_PROCID"]),
            size,
            int(environment.get("SLURM_LOCALID", 0)),
            sizes[int(environment.get("SLURM_NODEID", 0))],
            environment.get("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes)),
            int(environment.get("MASTER_PORT", port)),
        )

    def check_devices(self, devices: int | str) -> None:
        """Raise ConfigError where `runner.devices` is not the number of processes of this machine."""
        if devices not in ("auto", self.local_size):
            raise ConfigError(
                f"runner.devices: found {devices}, but the environment (RANK and WORLD_SIZE, or SLURM's) has "
                f"{self.local_size} processes on this machine; expected the same number, or auto. Set "
                f"runner.devices={self.local_size}, or clear these variables."
            )


SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_FOR_THE_OTHERS = 5.0
"""How long the other ranks of a failed one may take to notice and to end."""

SECONDS_TO_FINISH = 120.0
"""How long rank 0 may take to write its last files once the others have ended."""

INTERRUPTED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""The codes of a rank that has been told to stop."""


class Launch:
    """The folder by which the parent and its ranks tell each other things.

    Args:
        folder: a temporary one.

    Attributes:
        result: the file with what rank 0 returns.
        run_dir: the file that names the run folder, once there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.result, self.run_dir = folder, folder / "result.json", folder / "run_dir"

    def request(self, config: Any, output_dir: Path | None, origin: Origin, resume: str | Path | None) -> None:
        """Write what the ranks are to run."""
        text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
        (self.folder / "config.yaml").write_text(text, encoding="utf-8")
        output_dir = None if output_dir is None else Path(output_dir).absolute()
        content = _REQUEST.dump_json(_Request(output_dir, origin, trusted_packages(), resume))
        (self.folder / "request.json").write_bytes(content)

    def requested(self) -> "_Request":
        """Return what a rank is to run, beside its config."""
        return _REQUEST.validate_json((self.folder / "request.json").read_bytes())

    def note_failure(self, rank: int, error: BaseException, trace: str) -> None:
        """Leave an error of a rank to its parent."""
        text = str(error) if isinstance(error, RunError | ConfigError) else f"{type(error).__name__}: {error}"
        is_config = isinstance(error, ConfigError)
        content = {"time": time.time(), "rank": rank, "is_config": is_config, "text": text, "trace": trace}
        # In one step: the parent may look at any moment.
        with replacing(self.folder / f"failure_{rank}.json") as part:
            part.write_text(json.dumps(content))

    def first_failure(self) -> dict[str, Any] | None:
        """Return the error of the rank that failed first: those of others may be its consequences."""
        failures = [json.loads(path.read_text()) for path in self.folder.glob("failure_*.json")]
        return min(failures, key=lambda failure: failure["time"], default=None)


@dataclass(frozen=True)
class _Request:
    output_dir: Path | None
    origin: Origin
    trusted: dict[str, str | None]
    resume: str | Path | None


def launch(
    config: Any, num_ranks: int, output_dir: Path | None, origin: Origin, resume: str | Path | None = None
) -> dict[str, Any]:
    """Run a config on ranks of this machine.

    Args:
        config: a composed config.
        num_ranks: how many.
        output_dir: the run folder, or None for a new one.
        origin: of the config.
        resume: the run to go on with.

    Returns:
        What rank 0 returned, as `RunResult` has it.

    Raises:
        ConfigError: the config cannot run.
        RunError: a rank failed; the others have been ended.
        Interrupted: after Ctrl-C or SIGTERM, which the ranks were told of.
    """
    with tempfile.TemporaryDirectory(prefix="mlotool_") as folder:
        request = Launch(Path(folder))
        request.request(config, output_dir, origin, resume)
        processes: list[subprocess.Popen[bytes]] = []
        with _signals(processes) as signals:
            try:
                shared = _shared_environment(num_ranks)
                for rank in range(num_ranks):
                    processes.append(_start(request.folder, rank, shared))
                codes, lost = _wait(processes, signals)
            finally:
                _kill(processes)
        interrupts = [128 + signals[0]] if signals else [code for code in codes if code in INTERRUPTED]
        if interrupts or any(codes):
            error = Interrupted(max(interrupts)) if interrupts else _error(request, codes, lost)
            if not isinstance(error, ConfigError) and request.run_dir.exists():
                error.run_dir = Path(request.run_dir.read_text())
                if not interrupts:
                    RunFolder(error.run_dir).note_failure(str(error))
            raise error
        content: dict[str, Any] = json.loads(request.result.read_text())
        paths = {key: content[key] and Path(content[key]) for key in ("output_dir", "checkpoint")}
        return {**content, **paths}


def watch_parent() -> None:
    """End this process when its parent is gone, however that came: no rank outlives the run."""

    def wait() -> None:
        # The parent holds the other end and writes nothing.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _shared_environment(num_ranks: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # Together they would ask for more threads than there are cores, each for all of them.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    if sys.platform == "linux":
        # Gloo would look up the machine's name, which not every network knows.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    home = Path(mlotool.__file__).parents[1]
    if home.name != "site-packages":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
    return environment


def _start(folder: Path, rank: int, shared: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        # -P: the working directory is on the import path for packages that the user trusts, and comes last.
        [sys.executable, "-P", "-m", "mlotool", "rank", str(folder)],
        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdin=subprocess.PIPE,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        # A terminal's Ctrl-C comes through the parent alone.
        start_new_session=True,
    )


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", signals: list[int]) -> tuple[list[int], int | None]:
    """Return the exit codes of all, and the rank that was killed by another's hand than ours, if one was.

    The end of one may be that of the others.
    """
    first_end, lost = math.inf, None
    while True:
        codes = [process.poll() for process in processes]
        ends = [code for code in codes if code is not None]
        if ends and first_end == math.inf:
            first_end = time.monotonic()
            lost = next((rank for rank, code in enumerate(codes) if code is not None and code < 0), None)
        if len(ends) == len(codes):
            return ends, lost
        has_failed = any(code not in (0, *INTERRUPTED) for code in ends)
        # After Ctrl-C the others have nothing left to do once rank 0 has written its files.
        patience = SECONDS_FOR_THE_OTHERS if has_failed or codes[0] is not None else SECONDS_TO_FINISH
        if len(signals) > 1 or ((has_failed or signals) and time.monotonic() - first_end > patience):
            _kill(processes)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _kill(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            # Its whole session: loaders of data are processes too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def _signals(processes: "Sequence[subprocess.Popen[bytes]]") -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on, as Ctrl-C; yield those that came. The second one ends the ranks at once."""
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for process in processes if len(came) == 1 else ():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)

    with signals_to(take):
        yield came


def _error(request: Launch, codes: list[int], lost: int | None) -> ConfigError | RunError:
    """Return the error of the rank that failed first."""
    # What the others say of a rank that was killed is that they have lost it.
    failure = request.first_failure() if lost is None else None
    if failure is not None and failure["is_config"]:
        return ConfigError(failure["text"])
    if failure is not None:
        rank = failure["rank"]
        error = RunError(f"Rank {rank} of {len(codes)} failed: {failure['text']}")
        error.add_note(failure["trace"])
    else:
        rank = next(rank for rank, code in enumerate(codes) if code) if lost is None else lost
        code = codes[rank]
        end = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        error = RunError(
            f"Rank {rank} of {len(codes)} ended with {end} and without an error of its own; expected that all ranks "
            "finish. Look at its last lines above; a killed rank often had no memory left (fewer runner.devices, a "
            "smaller batch_size)."
        )
    error.exit_code = codes[rank] if codes[rank] > 0 else 128 - codes[rank]
    return error


_REQUEST = TypeAdapter(_Request)

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, an evaluation by rank 0 included."""


@contextmanager
def joined(world: World | None, device: torch.device) -> Iterator[Ranks]:
    """Join the processes of a run: gloo, and NCCL for tensors on GPUs.

    They stay joined until this process ends: the jobs of a sweep follow each other.

    Args:
        world: where this process stands; None is alone.
        device: where it computes.
    """
    if world is None or world.size == 1:
        yield Ranks()
        return
    if not dist.is_initialized():
        _join(world, device)
    try:
        yield Ranks(world.rank, world.size)
    except BaseException:
        # The others may be lost: saying goodbye would wait for them.
        atexit.unregister(_leave)
        raise


def _join(world: World, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # What torchrun has set is more than address and port: its agent may keep the store.
    place = "env://" if "RANK" in os.environ else f"tcp://{world.address}:{world.port}"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=place,
            rank=world.rank,
            world_size=world.size,
            timeout=TIMEOUT,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"Rank {world.rank} of {world.size} found no way to {world.address}:{world.port} ({error}); expected that "
            "all ranks reach rank 0 there. See that they are all started, and that MASTER_ADDR and MASTER_PORT (or "
            "GLOO_SOCKET_IFNAME) name a network that they share."
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
