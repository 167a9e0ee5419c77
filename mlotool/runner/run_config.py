"""Runs a config, here or on ranks of this machine, and leaves everything in the run folder.

On several ranks the parent only composes the config, watches the ranks, and ends them together. Each of them is a
`python -m mlotool rank FOLDER` with the environment of torchrun; the folder has the request, and takes what became of
it.
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
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import yaml
from pydantic import TypeAdapter
from pytorch_lightning import seed_everything
from pytorch_lightning.plugins.environments import SLURMEnvironment

import mlotool
from mlotool.config import Built, Origin, build, check, finish_provenance, load_run_config, trust_all
from mlotool.config.composition import check_composed, origin_of, plain
from mlotool.config.security.trusted import recall_trust, trusted_packages
from mlotool.core.arguments import is_number, require_path
from mlotool.core.errors import ConfigError, Interrupted, MlotoolError, RunError, RunFileError, WriteError
from mlotool.core.messages import is_command_line
from mlotool.distributed.collectives import Ranks
from mlotool.folders.files import replacing
from mlotool.folders.run_folder import RunFolder
from mlotool.runner import resume as resuming
from mlotool.runner.evaluation import Watch
from mlotool.runner.loading import inherit
from mlotool.runner.process_settings import count_devices, find_device, own_settings, signals_to
from mlotool.runner.records import write_inputs
from mlotool.runner.resume import EarlierRun
from mlotool.runner.session import AbstractSeat, OwnProcess, Session


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
                f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}. Start it with torchrun, or clear both."
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
        rank, local_rank, node = (int(environment.get(f"SLURM_{key}", 0)) for key in ("PROCID", "LOCALID", "NODEID"))
        address = environment.get("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes))
        return cls(rank, size, local_rank, sizes[node], address, int(environment.get("MASTER_PORT", port)))

    def check_devices(self, devices: int | str) -> None:
        """Raise ConfigError where `runner.devices` is not the number of processes of this machine."""
        if devices not in ("auto", self.local_size):
            raise ConfigError(
                f"runner.devices: found {devices}, but {self.local_size} processes were started here. Set it to that "
                "number."
            )


SECONDS_BETWEEN_LOOKS = 0.05
# How long the other ranks of a failed one may take to notice and to end.
SECONDS_FOR_THE_OTHERS = 5.0

# How long rank 0 may take to write its last files once the others have ended.
SECONDS_TO_FINISH = 120.0

# The codes of a rank that has been told to stop.
INTERRUPTED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@dataclass(frozen=True)
class _Request:
    output_dir: Path | None
    origin: Origin
    trusted: dict[str, str | None]
    resume: str | Path | None


_REQUEST = TypeAdapter(_Request)


class Launch:
    """The folder by which the parent and its ranks tell each other things.

    Args:
        folder: a temporary one.

    Attributes:
        result: the file with what rank 0 returns.
        run_dir: the file that names the run folder, once there is one.
        request: the file with what the ranks are to run, beside config.yaml.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.result, self.run_dir = folder, folder / "result.json", folder / "run_dir"
        self.request = folder / "request.json"

    def ask(self, config: Any, output_dir: Path | None, origin: Origin, resume: str | Path | None) -> None:
        """Write what the ranks are to run."""
        text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
        (self.folder / RunFolder.CONFIG).write_text(text, encoding="utf-8")
        output_dir = None if output_dir is None else Path(output_dir).absolute()
        self.request.write_bytes(_REQUEST.dump_json(_Request(output_dir, origin, trusted_packages(), resume)))

    def note_failure(self, rank: int, error: BaseException) -> None:
        """Leave an error of a rank, with its traceback, to its parent."""
        text = str(error) if isinstance(error, RunError | ConfigError) else f"{type(error).__name__}: {error}"
        content = {"time": time.time(), "rank": rank, "is_config": isinstance(error, ConfigError), "text": text}
        # In one step: the parent may look at any moment.
        with replacing(self.folder / f"failure_{rank}.json") as part:
            part.write_text(json.dumps({**content, "trace": traceback.format_exc()}))

    def first_failure(self) -> dict[str, Any] | None:
        """Return the error of the rank that failed first: those of others may be its consequences."""
        failures = [json.loads(path.read_text()) for path in self.folder.glob("failure_*.json")]
        return min(failures, key=lambda failure: failure["time"], default=None)


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
        request.ask(config, output_dir, origin, resume)
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
                    _note_failure(RunFolder(error.run_dir), str(error))
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
        size, port = str(num_ranks), str(free.getsockname()[1])
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **shared}
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
            f"Rank {rank} of {len(codes)} ended with {end} and without an error message; expected that all ranks "
            "finish. Look at its last lines above. A rank that was killed has often run out of memory: set fewer "
            "runner.devices, or a smaller batch_size."
        )
    error.exit_code = codes[rank] if codes[rank] > 0 else 128 - codes[rank]
    return error


# How long a rank waits for the others, an evaluation by rank 0 included.
TIMEOUT = timedelta(minutes=30)


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
            f"Rank {world.rank} of {world.size} cannot reach {world.address}:{world.port} ({error}). Check that all "
            "ranks are started, and that MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME name a network that they "
            "share."
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class RunRequest:
    """One run, alone or among several of a process.

    Args:
        config: a composed config, which has been checked.
        output_dir: the run folder; None makes one.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.
        resume: the run to go on with, as for `mlotool.run`.
        when_created: called with the path of the run folder, once it is made.
        ended_at: among several, the tick at which the run ended in an earlier process, whose place it keeps; None where
            it is to run.
        made: what a script has made, where the config only tells of it; None builds what the config describes.
    """

    config: Any
    output_dir: Path | None = None
    origin: Origin | None = None
    watch: Watch | None = None
    resume: str | Path | None = None
    when_created: Callable[[str], object] | None = None
    ended_at: int | None = None
    made: Built | None = None


@dataclass(frozen=True)
class RunResult:
    """The results of a run.

    Args:
        metrics: by key, the last logged value; values on `end` splits are those of the best checkpoint.
        output_dir: the run folder.
        checkpoint: the best checkpoint, or the last one if there is no objective; None if no checkpoint was kept.
        objective: the objective's value at the best checkpoint, or its last value if there is no best checkpoint.
        had_finished: whether the resumed run had finished already, so that nothing was done.
        ticks: by key of `metrics`, the tick at which the value was logged.
        best_tick: the tick of the best checkpoint, to which `objective` belongs; None if none was chosen.
    """

    metrics: dict[str, float]
    output_dir: Path
    checkpoint: Path | None
    objective: float | None
    had_finished: bool = False
    ticks: dict[str, int] = field(default_factory=dict)
    best_tick: int | None = None


def run(
    config: Any,
    *,
    output_dir: Path | None = None,
    origin: Origin | None = None,
    resume: str | Path | None = None,
    watch: Watch | None = None,
    when_created: Callable[[str], object] | None = None,
) -> RunResult:
    """Train the program that a config describes, and write a run folder.

    With `runner.devices` above 1 this starts that many processes and waits for them. If torchrun or SLURM has started
    this process as one of several, the run uses these, and the function returns the same result in all of them.

    Args:
        config: a config, as `mlotool.compose` returns it.
        output_dir: the run folder; None makes `outputs/<name>/<date>_<time>`.
        origin: the recipe and overrides of the config, for provenance.json; None takes what `mlotool.compose` has
            noted.
        resume: the run to resume, with bit-identical results and in its own folder: a run folder, a checkpoint in one,
            or "auto" for the newest unfinished run with the same config; None takes the config's `resume`.
        watch: a function that is called with tick and objective at each evaluation of the objective; if it returns
            true, the run ends as pruned.
        when_created: a function that is called with the path of the run folder, once it exists.

    Returns:
        Metrics, run folder, checkpoint and objective.

    Raises:
        ConfigError: the config cannot run.
        RunError: the run failed, for example with NonFiniteLossError; last.ckpt in the run folder holds a good state
            from before the failure.
        Interrupted: a KeyboardInterrupt after Ctrl-C or SIGTERM, once last.ckpt and summary.json are written.

    Example::

        result = mlotool.run(mlotool.compose("mwn", ["runner.max_ticks=100"]))
        result.metrics["val/accuracy"]
    """
    check_composed(config)
    require_path("run.output_dir", output_dir, "a path or null")
    if resume != "":
        require_path("run.resume", resume, "'auto', a run folder, a checkpoint in one or null", "auto")
    request = RunRequest(
        config, output_dir, origin, watch, config.get("resume") if resume is None else resume, when_created
    )
    runner, world = config.runner, World.find(os.environ)
    if world is not None:
        world.check_devices(runner.get("devices", 1))
    elif runner.get("devices", 1) != 1:
        if not is_command_line():
            # Its ranks would speak to the user of a command line.
            check(config, targets=True)
        if (num_ranks := count_devices(runner)) > 1:
            return _launched(request, num_ranks)
    with own_settings(runner, is_first=world is None or world.rank == 0):
        device = find_device(runner, 0 if world is None else world.local_rank)
        with joined(world, device) as ranks:
            return run_here(request, device, ranks, OwnProcess(ranks))


def _launched(request: RunRequest, num_ranks: int) -> RunResult:
    if request.watch is not None:
        warnings.warn(
            f"runner.devices: found {num_ranks} with a pruner; expected 1. The job will not be pruned: write "
            "sweep.pruner=none.",
            stacklevel=3,
        )
    origin = _origin(request.config, request.origin)
    return RunResult(**launch(request.config, num_ranks, request.output_dir, origin, request.resume))


def run_here(request: RunRequest, device: torch.device, ranks: Ranks, seat: AbstractSeat) -> RunResult:
    """Run a config in a process that has been set up for it: torch's settings, signals, the ranks.

    Args:
        request: the run.
        device: where it computes.
        ranks: those of the run.
        seat: its place in the process.
    """
    config = request.config
    with ExitStack() as stack:
        resume = request.resume
        earlier = (
            None if resume is None else ranks.of_first(lambda: resuming.find_run(config, resume, request.output_dir))
        )
        if earlier is not None and earlier.is_finished:
            return _finished(earlier.folder, config, ranks)
        built = request.made
        if built is None:
            seed_everything(config.seed, workers=True, verbose=False)
            built = build(config, ranks.reduce, seat.shared)
        if config.get("inherit") is not None and (earlier is None or resuming.choose_checkpoint(earlier) is None):
            inherit(built.program, Path(config.inherit))
        # Everything that can be wrong with the config is found before a folder is made.
        session = Session(config, built, device, seat, ranks, request.watch)
        if earlier is None:
            session.rehearse()
        folder, checkpoint = ranks.of_first(lambda: _begin(request, built, earlier, stack, is_alone=ranks.size == 1))
        if ranks.is_first and request.when_created is not None:
            request.when_created(str(folder.path))
        try:
            summary = session.run(folder, checkpoint)
        except (RunError, Interrupted) as error:
            error.run_dir = folder.path
            raise
        finally:
            if ranks.is_first:
                # The run is done, or has an error of its own that matters more.
                with suppress(WriteError, RunFileError):
                    finish_provenance(folder)
        best, objective = summary["best"] or {}, summary["objective"]["value"]
        metrics, ticks, best_tick = dict(summary["metrics"]), dict(summary["ticks"]), best.get("tick")
        checkpoint = folder.kept()
        return ranks.first(RunResult(metrics, folder.path, checkpoint, objective, ticks=ticks, best_tick=best_tick))


def _begin(
    request: RunRequest, built: Any, earlier: EarlierRun | None, stack: ExitStack, *, is_alone: bool
) -> tuple[RunFolder, Path | None]:
    """Return the folder, which the stack keeps locked, with its inputs, and the checkpoint to go on from."""
    config, origin = request.config, _origin(request.config, request.origin)
    if earlier is None:
        folder = RunFolder.create(config.name, request.output_dir)
        stack.enter_context(folder.lock())
        write_inputs(folder, config, origin, built)
        return folder, None
    folder = earlier.folder
    if not stack.enter_context(folder.lock(resuming.PATIENCE_S)):
        raise ConfigError(
            f"resume: found '{folder.path}', which another process is writing. Wait for it, or leave resume out."
        )
    if not folder.has_inputs:
        # It was killed while it wrote them.
        write_inputs(folder, config, origin, built)
    # Shards are put together by all ranks, and this is the first one's alone.
    return folder, resuming.go_on(earlier, config, origin, built.program if is_alone else None)


def _origin(config: Any, origin: Origin | None) -> Origin:
    return origin or origin_of(config) or Origin("mlotool.run", (), None)


def _finished(folder: RunFolder, config: Any, ranks: Ranks) -> RunResult:
    """Return the result of a run that has nothing left to do; its summary may be anybody's."""
    summary = folder.summary()
    if ranks.is_first:
        limit = config.debug.limit_ticks
        key = "runner.max_ticks" if limit is None or limit >= config.runner.max_ticks else "debug.limit_ticks"
        resuming.say(
            f"{folder.path} has finished after {summary['num_ticks']} ticks; nothing is changed. Raise {key} to go on, "
            "or leave resume out for a new run."
        )
    names = ("metrics", "objective", "ticks", "best")
    parts = {key: part if isinstance(part := summary.get(key), dict) else {} for key in names}
    values = {key: float(value) if is_number(value) else math.nan for key, value in parts["metrics"].items()}
    value = parts["objective"].get("value")
    ticks = {key: int(tick) for key, tick in parts["ticks"].items() if is_number(tick)}
    tick = parts["best"].get("tick")
    best = int(tick) if isinstance(tick, int) else None
    objective = value if is_number(value) else None
    return RunResult(values, folder.path, folder.kept(), objective, had_finished=True, ticks=ticks, best_tick=best)


def _note_failure(folder: RunFolder, error: str) -> None:
    """Write the cause of a failure, where the run has written a consequence, or nothing."""
    if not folder.summary():
        finish_provenance(folder)
        folder.write_summary({"num_ticks": 0, "training_s": 0.0})
    folder.write_failure(error)


def serve(folder: Path) -> int:
    """Run what a parent has requested, as the rank of the environment.

    Args:
        folder: of the launch.

    Returns:
        The exit code; the parent reports the error.
    """
    launch, rank = Launch(folder), int(os.environ["RANK"])
    watch_parent()
    with warnings.catch_warnings():
        if rank:
            # Rank 0 says it.
            warnings.simplefilter("ignore")
        try:
            request = _REQUEST.validate_json(launch.request.read_bytes())
            # The parent may have found them in the folder of a script, or in a directory that it has left.
            sys.path += [home for home in request.trusted.values() if home is not None and home not in sys.path]
            trust_all(request.trusted)
            recall_trust(lambda _: None)  # the parent has said it
            config, told = load_run_config(folder, is_own=True), launch.run_dir.write_text
            origin, output_dir, resume = request.origin, request.output_dir, request.resume
            result = run(config, output_dir=output_dir, origin=origin, resume=resume, when_created=told)
        except KeyboardInterrupt as interrupted:
            return getattr(interrupted, "exit_code", INTERRUPTED[0])
        except BaseException as error:
            launch.note_failure(rank, error)
            return error.exit_code if isinstance(error, MlotoolError) else 1
    if rank == 0:
        launch.result.write_text(json.dumps(vars(result), default=str))
    return 0
