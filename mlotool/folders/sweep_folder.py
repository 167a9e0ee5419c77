"""The folder of a sweep: what it holds beside the folders of its jobs is named, written and read here alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.folders import safe_files
from mlotool.folders.files import is_held, lock, writing
from mlotool.folders.run_folder import Folder, RunFolder

# Of processes with several jobs that are looked at.
MAX_FILES = 2_000


class SweepFolder(Folder):
    """The folder of a sweep; job `n` has the run folder `<path>/n`.

    Example:
        >>> SweepFolder(Path("no-such-sweep")).jobs()
        []
    """

    # What makes it this sweep and no other; jobs that have not begun, for the report; jobs that share a process.
    IDENTITY, PLAN, GROUPS = "sweep.json", "plan.json", "groups.json"
    # Optuna's trials; and what the process that runs the jobs holds.
    STUDY, LOCK = "study.db", ".lock"
    # Of `sweep=pbt`: the members, and who has copied whom. And the best job, with the line that repeats it.
    POPULATION, BEST = "population.json", "best.yaml"
    TABLE, SETTINGS, PAGE, FIGURES = "sweep.csv", "settings.csv", "sweep.html", "report"
    # The folder of what processes with several jobs leave.
    TOGETHER = "fusion"

    @property
    def is_sweep(self) -> bool:
        """Whether it is the folder of a sweep, of Hydra's own launcher too."""
        return any(map(self.has, (self.IDENTITY, self.PLAN, "multirun.yaml")))

    @property
    def is_running(self) -> bool:
        """Whether a process runs its jobs."""
        return is_held(self.path / self.LOCK)

    def jobs(self) -> list[RunFolder]:
        """Return the folders of its jobs, by number; no link, which may lead to a run of another place."""
        paths = list(self.path.iterdir()) if self.path.is_dir() else []
        jobs = [path for path in paths if path.name.isascii() and path.name.isdigit() and not path.is_symlink()]
        return [RunFolder(path) for path in sorted(jobs, key=lambda path: int(path.name)) if path.is_dir()]

    def beside(self) -> list["SweepFolder"]:
        """Return the sweeps in the same folder, the newest last; no link, which may lead to one of another place."""
        files = self.path.parent.glob(f"*/{self.IDENTITY}")
        return [SweepFolder(path) for path in sorted(file.parent for file in files if not file.parent.is_symlink())]

    def create(self, name: str, identity: Mapping[str, Any]) -> None:
        """Make the folder, with what makes it this sweep.

        Raises:
            ConfigError: it holds files of a job already.
        """
        jobs = (path for path in sorted(self.path.glob("*")) if path.name.isdigit() and path.is_dir())
        taken = next((path for path in jobs if any(path.iterdir())), None)
        if taken is not None:
            # It would be taken for the job's own run, or be removed.
            raise ConfigError(
                f"hydra.sweep.dir: found {taken}, the folder of a job, which has files already. Name another folder, "
                "or remove it."
            )
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_json(self.IDENTITY, {"name": name, "identity": identity, "study": self.path.name})

    def discard(self) -> None:
        """Remove what was written for a sweep that cannot start."""
        for name in (self.IDENTITY, self.LOCK, self.STUDY, self.PLAN, self.POPULATION):
            (self.path / name).unlink(missing_ok=True)
        # The user may have chosen a folder that holds other files.
        with suppress(OSError):
            self.path.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold it, so that no second process runs its jobs; a process that dies lets go of it.

        Raises:
            ConfigError: another process holds it.
        """
        # What the jobs write stays in the folder, which may be a stranger's that is gone on with.
        safe_files.check_tree(self.path)
        with writing(self.path / self.LOCK):
            (self.path / self.LOCK).touch()
        with lock(self.path / self.LOCK) as is_free:
            if not is_free:
                raise ConfigError(
                    f"resume: found {self.path}, whose sweep is still running. Wait for it, or end that process."
                )
            yield

    def identity(self) -> dict[str, Any]:
        """Return what makes it this sweep; empty where it does not say."""
        identity = self._began().get("identity")
        return identity if isinstance(identity, dict) else {}

    def study_name(self) -> str:
        """Return what its study is called in Optuna's database: as the folder was when the sweep began."""
        name = self._began().get("study")
        return name if isinstance(name, str) else self.path.name

    def _began(self) -> dict[str, Any]:
        with suppress(RunFileError):
            return self.json(self.IDENTITY) or {}
        return {}

    def plan(self) -> dict[str, Any]:
        """Return what the report says of jobs that have not begun; empty where it was not written."""
        return self.json(self.PLAN) or {}

    def together(self, first: str, suffix: str) -> Path:
        """Return the file of what a process with several jobs leaves.

        Args:
            first: name of the first job's folder.
            suffix: `.log` of what it prints, `.json` of which jobs ran as one program.
        """
        return self.path / self.TOGETHER / f"{first}{suffix}"

    def together_names(self, suffix: str) -> list[str]:
        """Return the names of these files, relative to the folder."""
        return safe_files.list_files(self.path, self.TOGETHER, suffix, MAX_FILES)

    def note_alone(self, numbers: list[int], reason: str) -> None:
        """Leave to the sweep's page why jobs do not share processes."""
        stack = {"jobs": numbers, "is_fused": False, "fused_s": None, "alone_s": None, "reason": reason}
        path = self.together("0", ".json")
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        self.write_json(f"{self.TOGETHER}/0.json", {"jobs": numbers, "stacks": [stack]}, indent=None)
