"""Population based training, without the training: who copies whom at a tick, and by which settings each was trained.

Source: Jaderberg et al. 2017, Population Based Training of Neural Networks, with truncation selection.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic import dataclasses as validated

from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.folders.sweep_folder import SweepFolder

# Settings that change while a run trains: all else would need another program.
SEARCHABLE = "problems.*.optimizer.*"
# Of the run, where `sweep.pbt.interval` does not say it.
_EXCHANGES = 10

Settings = dict[str, float]
Whole = Annotated[int, Field(ge=0, lt=10**15)]


@validated.dataclass(frozen=True)
class Copy:
    """A member that went on with the state of another one.

    Args:
        tick: after which it did.
        member: which one; the number of its job.
        source: whose state it took.
        settings: its own from then on.
        value: of its objective at that tick.
        source_value: of the other one's.
    """

    tick: Whole
    member: Whole
    source: Whole
    settings: Settings
    value: float
    source_value: float


@validated.dataclass(frozen=True)
class Rules:
    """How members exchange their states.

    Args:
        interval: ticks between two exchanges.
        fraction: of the members, those that copy another one each time.
        resample: with which probability a setting is drawn anew in place of being moved.
        factor: by which it is multiplied or divided else.
        seed: of all that is drawn.
        mode: which objective is better.
    """

    interval: Annotated[int, Field(ge=1)]
    fraction: Annotated[float, Field(gt=0, le=0.5)]
    resample: Annotated[float, Field(ge=0, le=1)]
    factor: Annotated[float, Field(gt=1)]
    seed: int
    mode: Literal["min", "max"]


@validated.dataclass
class Population:
    """The members of a sweep, what they were trained by, and what they have copied; in population.json.

    Args:
        rules: of their exchanges.
        dimensions: what is searched.
        settings: of each member, those that it began with.
        ticks: of the exchanges that there were.
        copies: what was copied, in the order of the ticks.

    Example:
        >>> rate = Dimension("problems.net.optimizer.lr", low=0.01, high=1.0, log=True)
        >>> rules = Rules(interval=10, fraction=0.5, resample=0.0, factor=2.0, seed=0, mode="max")
        >>> population = Population(rules, [rate], [{rate.key: 0.1}, {rate.key: 0.4}])
        >>> [copy] = population.exchange(10, {0: 0.5, 1: 0.9})
        >>> copy.member, copy.source, copy.settings[rate.key] in (0.2, 0.8)
        (0, 1, True)
        >>> [(tick, settings[rate.key]) for tick, settings in population.schedule(0, until=20)][0]
        (0, 0.4)
    """

    rules: Rules
    dimensions: list[Dimension]
    settings: list[Settings]
    ticks: list[Whole] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    @classmethod
    def read(cls, folder: SweepFolder) -> "Population | None":
        """Return what a sweep's folder has; None without the file, or where nobody of ours has written it."""
        try:
            content = folder.json(folder.POPULATION)
            return None if content is None else TypeAdapter(cls).validate_python(content)
        except (RunFileError, ValidationError):
            return None

    def write(self, folder: SweepFolder) -> None:
        """Write it into a sweep's folder."""
        folder.write_json(folder.POPULATION, TypeAdapter(Population).dump_python(self, mode="json"))

    def check(self) -> None:
        """Refuse what stands in a folder and is none of this population.

        Raises:
            ConfigError: a member that it has not, or settings that are not searched.
        """
        keys, members = {dimension.name for dimension in self.dimensions}, range(len(self.settings))
        for copy in self.copies:
            is_whole = copy.settings.keys() == keys and all(map(math.isfinite, copy.settings.values()))
            if copy.member not in members or copy.source not in members or not is_whole:
                raise ConfigError(
                    f"resume: found a copy of job {copy.member} in {SweepFolder.POPULATION} that is not of this sweep; "
                    "expected the file that the same command has written. Leave resume out for a new sweep."
                )

    def is_due(self, tick: int, last_tick: int) -> bool:
        """Say whether members exchange their states after a tick; at the end of the run there is nothing to gain."""
        return 0 < tick < last_tick and tick % self.rules.interval == 0

    def exchange(self, tick: int, values: Mapping[int, float]) -> list[Copy]:
        """Return what is copied after a tick: the same each time that it is asked.

        Args:
            tick: of the exchange.
            values: of the objective, by member that is still trained.
        """
        if tick not in self.ticks:
            self.ticks.append(tick)
            self.copies += self._chosen(tick, values)
        return [copy for copy in self.copies if copy.tick == tick]

    def _chosen(self, tick: int, values: Mapping[int, float]) -> Iterator[Copy]:
        sign, generator = (1 if self.rules.mode == "max" else -1), random.Random(f"{self.rules.seed} {tick}")
        order = sorted(values, key=lambda member: (-sign * values[member], member))
        # At most half of them, so that none is among the best and the worst.
        count = min(max(1, round(self.rules.fraction * len(order))), len(order) // 2)
        for member in order[len(order) - count :]:
            source = generator.choice(order[:count])
            if values[member] == values[source]:
                continue
            before = self.now(source, tick)
            settings = {
                dimension.name: dimension.moved(
                    before[dimension.name], generator, self.rules.resample, self.rules.factor
                )
                for dimension in self.dimensions
            }
            yield Copy(tick, member, source, settings, values[member], values[source])

    def history(self, member: int) -> list[Copy]:
        """Return what a member has copied."""
        return [copy for copy in self.copies if copy.member == member]

    def now(self, member: int, tick: int) -> Settings:
        """Return a member's settings in the tick before an exchange, or after the last one."""
        before = [copy for copy in self.history(member) if copy.tick < tick]
        return before[-1].settings if before else self.settings[member]

    def schedule(self, member: int, until: float = math.inf) -> list[tuple[int, Settings]]:
        """Return by which settings the state of a member was trained, each with the tick after which they began.

        Args:
            member: whose state it is.
            until: the state's tick; without one, that after the last exchange.
        """
        before = [copy for copy in self.history(member) if copy.tick < until]
        if not before:
            return [(0, self.settings[member])]
        last = before[-1]
        return [*self.schedule(last.source, last.tick), (last.tick, last.settings)]


def draw_population(plan: SweepPlan) -> Population:
    """Return the members that a sweep begins with.

    The first one has the recipe's own values, unless `sweep.recipe_first` says otherwise or they are out of range.

    Raises:
        ConfigError: something cannot be searched while runs train, or there is no objective to compare them by.
    """
    rules = _rules(plan)
    for dimension in plan.dimensions:
        _check_searchable(plan, dimension)
    given = plan.first_settings()
    members = []
    for number in range(plan.num_jobs):
        generator = random.Random(f"{rules.seed} member {number}")
        own = given[number] if number < len(given) else {}
        members.append(
            {
                dimension.name: float(own[dimension.key]) if dimension.key in own else dimension.drawn(generator)
                for dimension in plan.dimensions
            }
        )
    return Population(rules, list(plan.dimensions), members)


def _rules(plan: SweepPlan) -> Rules:
    settings, every = plan.settings, plan.evaluation_interval
    if plan.mode is None or every is None:
        raise ConfigError(
            f"objective: found {plan.objective} with sweep=pbt, which compares members while they train; expected a "
            "metric that is evaluated at an interval. Set objective=val/accuracy evaluate.splits.val=100."
        )
    if not plan.dimensions:
        raise ConfigError(
            "sweep.params: found nothing to search; expected ranges of optimizer settings. Write "
            f"'{next(iter(_searchable(plan)), 'problems.<name>.optimizer.lr')}=tag(log, interval(1e-3, 1e-1))'."
        )
    for key, value in (("sweep.workers", settings["workers"]), ("runner.devices", plan.devices_per_job),
                       ("sweep.repeats", settings["repeats"])):  # fmt: skip
        if value != 1:
            raise ConfigError(
                f"{key}: found {value} with sweep=pbt, whose members train in one process, once each; expected 1. "
                "Leave it out."
            )
    if settings["num_trials"] < 2:
        raise ConfigError(
            "sweep.num_trials: found 1 with sweep=pbt; expected at least 2 members, of which one can copy the other. "
            "Set sweep.num_trials=8."
        )
    pbt, ticks = settings["pbt"], plan.last_tick or 0
    interval = pbt["interval"] or every * max(1, math.ceil(ticks / _EXCHANGES / every))
    if interval % every or not 0 < interval < ticks:
        raise ConfigError(
            f"sweep.pbt.interval: found {interval}; expected a multiple of the {every} ticks between two evaluations "
            f"of {plan.objective}, below the {ticks} ticks of the run. Set it so, or runner.max_ticks, or "
            "evaluate.splits."
        )
    return Rules(interval, pbt["fraction"], pbt["resample"], pbt["factor"], settings["seed"], plan.mode)  # type: ignore[arg-type]


def _check_searchable(plan: SweepPlan, dimension: Dimension) -> None:
    options = _searchable(plan)
    if dimension.name not in options:
        raise ConfigError(
            f"{dimension.key}: cannot be searched with sweep=pbt, which changes settings while runs train; expected "
            f"one of {', '.join(options) or 'none'}. Leave it out, or search it with sweep=optuna."
        )
    if dimension.low is None:
        for choice in dimension.choices:
            try:
                float(choice)
            except ValueError:
                raise ConfigError(
                    f"{dimension.key}: found {choice} with sweep=pbt; expected numbers. Write them, or an interval."
                ) from None


def _searchable(plan: SweepPlan) -> list[str]:
    """Return the settings that may be searched: numbers of optimizers that step all parameters alike."""
    from mlotool.config.composition import plain

    problems: Mapping[str, Any] = plain(plan.config.problems) if plan.config is not None else {}
    swept, options = [dimension.name for dimension in plan.dimensions], []
    for name, problem in problems.items():
        optimizer = problem.get("optimizer")
        if not isinstance(optimizer, Mapping) or "groups" in optimizer:
            continue
        prefix = f"problems.{name}.optimizer"
        numbers = [key for key, value in optimizer.items() if type(value) in (int, float)]
        # One that the recipe leaves at torch's default is added by the command line: `+problems.net.optimizer.eps=..`.
        others = [key.removeprefix(f"{prefix}.") for key in swept if fnmatchcase(key, f"{prefix}.*")]
        numbers += [key for key in others if key not in optimizer and "." not in key and key != "_target_"]
        options += [f"{prefix}.{key}" for key in numbers]
    return options


def override_words(population: Population, plan: SweepPlan) -> Sequence[tuple[str, ...]]:
    """Return the overrides of each member."""
    keys = [dimension.key for dimension in plan.dimensions]
    return [tuple(f"{key}={settings[key.lstrip('+')]!r}" for key in keys) for settings in population.settings]
