"""Population based training: runs of one process, of which the worst go on from the states of the best.

All members have the seed of the recipe, so that the state of each is what one run reaches whose settings change.
"""

from collections.abc import Callable
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint

from mlotool.config.sweeps.population import Copy, Population
from mlotool.core.errors import RunError
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.runner.changes import set_settings
from mlotool.runner.checkpoint import LastCheckpoint


class Member(Checkpoint):
    """A run of a population: it waits for the others where states are exchanged.

    It is a callback of the run's trainer between those that write the best and the last checkpoint. So the best one is
    from before the exchange, and the last one from after it.

    Args:
        exchange: the population's.
        number: of the run among its members.
        wait: returns once all members are there and have exchanged their states, or the run is to stop.

    Attributes:
        session: the run, while it trains.
        met_at: the tick of the last exchange that it took part in.
    """

    session: Any

    def __init__(self, exchange: "Exchange", number: int, wait: Callable[[], None]) -> None:
        self._exchange, self.number, self._wait = exchange, number, wait
        self._last: LastCheckpoint | None = None
        self.met_at = 0

    @property
    def tick(self) -> int:
        """How many ticks its state has behind it."""
        return int(self.session.schedule.num_ticks)

    @property
    def value(self) -> float:
        """Its last value of the objective: where members meet, that of their tick."""
        return float(self.session.metric_log.last[self.session.objective.monitor])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take its place; a run that was stopped where it waited waits again."""
        self.session = pl_module
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._last = next((one for one in callbacks if isinstance(one, LastCheckpoint)), None)
        self._exchange.join(self)
        if self.met_at < self.tick and self._exchange.is_due(self):
            self._wait()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait, where the objective has been evaluated and an exchange is due."""
        if not self.session.is_cut and self._exchange.is_due(self):
            self._wait()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the others."""
        self._exchange.leave(self)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the others."""
        self._exchange.leave(self)

    def met(self) -> None:
        """Take note that the exchange of this tick is done."""
        self.met_at = self.tick
        if self._last is not None:
            # It is written next, before any member's next tick: no checkpoint is from between two exchanges.
            self._last.due_at = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"met_at": self.met_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.met_at = state_dict["met_at"]


class Exchange:
    """Where the members of a population meet.

    What is exchanged stands in population.json before any state changes. So a sweep that was killed in the middle does
    the same again: a member whose checkpoint is older repeats its ticks, and finds there what it copies.

    Args:
        folder: of the sweep.
        numbers: of the jobs, by place among the runs of the process.
        say: takes lines for the log.
    """

    def __init__(self, folder: SweepFolder, numbers: list[int], say: Callable[[str], None]) -> None:
        population = Population.read(folder)
        if population is None:
            raise RunError(
                f"{folder.path / folder.POPULATION} is missing, or not as `mlotool run -m` wrote it; expected the "
                "population of this sweep. Start the sweep again."
            )
        self._folder, self.population, self._numbers, self._say = folder, population, numbers, say
        self._members: dict[int, Member] = {}

    def member(self, place: int, wait: Callable[[], None]) -> Member:
        """Return a callback for the run at a place among those of the process."""
        return Member(self, self._numbers[place], wait)

    def join(self, member: Member) -> None:
        """Take in a member that begins or goes on."""
        self._members[member.number] = member
        self._write_lineage(member.number)

    def leave(self, member: Member) -> None:
        """Take note that a member has ended."""
        self._members.pop(member.number, None)

    def is_due(self, member: Member) -> bool:
        """Say whether members meet at a member's tick."""
        return self.population.is_due(member.tick, member.session.plan.max_ticks)

    def meet(self) -> None:
        """Exchange the states of the members, all of which are at one tick or have been there.

        Raises:
            RunError: a state that was to be copied is gone.
        """
        waiting = [member for member in self._members.values() if self.is_due(member) and member.met_at < member.tick]
        tick = min(member.tick for member in waiting)
        values = {member.number: member.value for member in self._members.values()}
        copies = self.population.exchange(tick, values)
        self.population.write(self._folder)
        for member in waiting:
            for copy in (copy for copy in copies if copy.member == member.number):
                self._copy(copy)
        for member in waiting:
            member.met()

    def _copy(self, copy: Copy) -> None:
        target, source = self._members[copy.member], self._members.get(copy.source)
        if source is None or source.tick != copy.tick:
            raise RunError(
                f"Job {copy.member} should continue from the state of job {copy.source} after tick {copy.tick}, but "
                "that job has ended or gone on since then; expected it at that tick. Start the sweep again."
            )
        target.session.take_over(source.session)
        set_settings(target.session.program, copy.settings)
        self._write_lineage(copy.member)
        settings = " ".join(f"{key}={value:.4g}" for key, value in copy.settings.items())
        self._say(
            f"tick {copy.tick}: job {copy.member} ({copy.value:.4g}) goes on from job {copy.source} "
            f"({copy.source_value:.4g}) with {settings}"
        )

    def _write_lineage(self, number: int) -> None:
        """Leave in a member's folder by which settings its state was trained, and whose it was."""
        population = self.population
        began = {"tick": 0, "source": None, "settings": population.settings[number]}
        copies = [
            {"tick": copy.tick, "source": copy.source, "settings": copy.settings} for copy in population.history(number)
        ]
        trained = [{"tick": tick, "settings": settings} for tick, settings in population.schedule(number)]
        content = {"history": [began, *copies], "trained_by": trained}
        RunFolder(self._folder.path / str(number)).write_json(RunFolder.LINEAGE, content)
