"""What a command line with -m asks for: fixed overrides, and the choices and ranges to go through."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config import composition
from mlotool.config.check_values import sweep_faults
from mlotool.config.checks import check
from mlotool.config.hydra_errors import config_errors
from mlotool.config.objective import direction_faults, objective_direction
from mlotool.config.recipes import package_dir
from mlotool.config.run_config import max_ticks, may_differ
from mlotool.config.schema import describe_type, name_fault
from mlotool.config.unknown_keys import value_faults
from mlotool.core.errors import ConfigError

# Of a grid, and values of a key.
MAX_JOBS = 1_000_000

# Jobs of one process with `sweep.fuse=auto`.
MAX_FUSED = 32

# Of jobs that a search has at least with `sweep.fuse=auto`: it draws those of a round without knowing how they end.
_ROUNDS = 4

# Of an interval: drawn by its logarithm, whole numbers, and first draws around the recipe's own value.
TAGS = ("log", "int", "prior")

# Standard deviation of such draws, as a part of the interval.
_SPREAD = 0.25

# Begins the keys of choices of a model space.
_DECISION = "decisions."

# Of what the last tick of a job depends on.
_LENGTH = ("runner", "runner.max_ticks", "debug", "debug.limit_ticks", "recipe")

# Of what it depends on whether a larger objective is better.
_DIRECTION = ("objective", "objective_mode", "evaluate", "recipe")


@dataclass(frozen=True)
class Dimension:
    """One key of a sweep.

    Args:
        key: as it stands before the `=` of an override.
        choices: its values, as they stand behind it; none where there is only a range.
        low: the lower end of a range, both ends included; None where there are only choices.
        high: the upper end.
        step: between the values of a range; None: all values in between.
        log: whether small and large values of a range are equally likely by their logarithm.
        whole: whether a range is one of whole numbers.
        around: of an interval that is tagged `prior`, the recipe's own value; None without the tag.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    whole: bool = False
    around: float | None = None

    @property
    def name(self) -> str:
        """Its key in the config."""
        return self.key.lstrip("+")

    @property
    def first(self) -> str:
        """Its first value, as it stands behind the `=`."""
        if self.choices:
            return self.choices[0]
        assert self.low is not None
        return str(int(self.low)) if self.whole else str(self.low)

    def fitting(self, value: Any) -> str | float | None:
        """Return a value as a search has it: a choice as it was written, or a number; None where it is none of these.

        Example:
            >>> rate = Dimension("lr", ("1e-3", "1e-2"))
            >>> rate.fitting(0.01), rate.fitting(0.1), Dimension("lr", low=0.0, high=0.1).fitting(0.1)
            ('1e-2', None, 0.1)
        """
        number = _number(value)
        if self.low is None or self.high is None:
            alike = (text for text in self.choices if text == str(value) or number is not None is not _number(text))
            return next((text for text in alike if text == str(value) or _number(text) == number), None)
        if number is None or not self.low <= number <= self.high:
            return None
        step = self.step or (1 if self.whole else None)
        if step is not None and not ((number - self.low) / step).is_integer():
            return None
        return int(number) if self.whole else number

    def drawn(self, generator: random.Random) -> float:
        """Draw a number: all are as likely, or more those around `around`."""
        if self.low is None:
            return float(generator.choice(self.choices))
        place = generator.random()
        if self.around is not None:
            place = -1.0
            while not 0 <= place <= 1:
                place = generator.gauss(self._place(self.around), _SPREAD)
        return self._at(place)

    def moved(self, value: float, generator: random.Random, resample: float, factor: float) -> float:
        """Return a number near another one, multiplied or divided by a factor; of choices, one that is next to it.

        Args:
            value: the other one.
            generator: of random numbers.
            resample: with which probability it is drawn anew instead.
            factor: above 1.
        """
        if generator.random() < resample:
            return self.drawn(generator)
        is_up = generator.random() < 0.5
        if self.low is None or self.high is None:
            choices = sorted(map(float, self.choices))
            place = choices.index(value) + (1 if is_up else -1)
            return choices[min(max(place, 0), len(choices) - 1)]
        number = value * factor if is_up else value / factor
        if step := self.step or (1 if self.whole else None):
            # At least one step: a whole number below 4 would stay what it is.
            number = value + (1 if is_up else -1) * max(step, step * round(abs(number - value) / step))
        return min(max(number, self.low), self.high)

    def _place(self, value: float) -> float:
        """Return where a number lies: 0 at the lower end, 1 at the upper one."""
        assert self.low is not None and self.high is not None
        low, high, inner = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (inner - low) / (high - low) if high > low else 0.5

    def _at(self, place: float) -> float:
        assert self.low is not None and self.high is not None
        low, high = (math.log(x) if self.log else x for x in (self.low, self.high))
        inner = low + (high - low) * place
        number = math.exp(inner) if self.log else inner
        if step := self.step or (1 if self.whole else None):
            number = self.low + step * round((number - self.low) / step)
        return min(max(number, self.low), self.high)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class SweepPlan:
    """A sweep as it was asked for.

    Args:
        fixed: overrides that all jobs share.
        dimensions: what differs, in the order of the command line.
        settings: the config's `sweep`.
        folder: `hydra.sweep.dir`.
        name: of the recipe.
        objective: the key that Optuna looks at; None where the recipe has none.
        mode: "min" or "max"; None where there is no objective, or it is a part of the sweep.
        accelerator: `runner.accelerator`.
        devices_per_job: `runner.devices`.
        seed: of the jobs.
        last_tick: of each job; None where it is a part of the sweep.
        listed: `key=choices` of `sweep.params`, which Hydra's own sweeper does not know.
        config: what the fixed overrides compose; None: to be composed where it is wanted.
    """

    fixed: tuple[str, ...]
    dimensions: tuple[Dimension, ...]
    settings: Mapping[str, Any]
    folder: Path
    name: str
    objective: str | None
    mode: str | None
    accelerator: str
    devices_per_job: int
    seed: int = 0
    last_tick: int | None = None
    listed: tuple[str, ...] = ()
    config: DictConfig | None = field(default=None, repr=False, compare=False)

    @property
    def needs_processes(self) -> bool:
        """Whether Hydra's own sweeper, which runs one job after the other in this process, is not enough."""
        settings = self.settings
        is_plain = settings["method"] == "grid" and settings["workers"] == 1 and settings["launcher"] == "local"
        return not is_plain or settings["fuse"] != 1

    @property
    def group_size(self) -> int:
        """How many jobs share a process, at most."""
        fuse = self.settings["fuse"]
        if self.settings["method"] == "pbt":
            # Its members copy each other.
            return self.num_jobs
        if self.devices_per_job != 1:
            # Such a job is several processes itself.
            return 1
        if fuse != "auto":
            return int(fuse)
        num_rounds = self.settings["workers"] * (_ROUNDS if self.settings["method"] == "optuna" else 1)
        return max(1, min(-(-self.num_jobs // num_rounds), MAX_FUSED))

    @property
    def num_jobs(self) -> int:
        """How many jobs it has."""
        if self.settings["method"] != "grid":
            return int(self.settings["num_trials"]) * int(self.settings["repeats"])
        return math.prod(len(dimension.choices) for dimension in self.dimensions)

    @property
    def shared_words(self) -> list[str]:
        """The overrides that all jobs share, without Hydra's own settings."""
        return [word for word in self.fixed if not word.startswith("hydra.")]

    @property
    def first_words(self) -> list[str]:
        """The overrides of the first job."""
        return [f"{dimension.key}={dimension.first}" for dimension in self.dimensions]

    @property
    def evaluation_interval(self) -> int | None:
        """Ticks between two evaluations of the objective; None where it is not evaluated while a run trains."""
        splits = None if self.config is None else OmegaConf.select(self.config, "evaluate.splits")
        every = (splits or {}).get(str(self.objective).partition("/")[0])
        return every if isinstance(every, int) else None

    def first_settings(self) -> list[dict[str, Any]]:
        """Return the settings that a search tries first, by key: the recipe's own values, then those of `sweep.first`.

        A value of the recipe's that is not searched, as it lies out of the range, is left out.

        Raises:
            ConfigError: `sweep.first` has a key that is not searched, or a value out of its range.
        """
        first = []
        if self.settings["recipe_first"] and self.config is not None:
            own = {dimension.key: dimension.fitting(_own(self.config, dimension)) for dimension in self.dimensions}
            first.append({key: value for key, value in own.items() if value is not None})
        dimensions = {dimension.name: dimension for dimension in self.dimensions}
        for number, settings in enumerate(self.settings["first"]):
            place = f"sweep.first[{number}]"
            if not isinstance(settings, Mapping):
                raise ConfigError(
                    f"{place}: found {settings}; expected {{key: value}}, as in sweep.params. Correct it."
                )
            given = {}
            for key, value in settings.items():
                if key not in dimensions and not str(key).startswith(_DECISION):
                    known = ", ".join(dimensions) or "none"
                    raise ConfigError(f"{place}.{key}: found a key that is not searched; expected {known}. Correct it.")
                fitting = dimensions[key].fitting(value) if key in dimensions else value
                if fitting is None:
                    line = f"{key}={value}"
                    raise ConfigError(f"{place}: found {line}, which is not searched. Correct it, or widen the range.")
                given[dimensions[key].key if key in dimensions else key] = fitting
            first.append(given)
        return first

    def identity(self) -> dict[str, Any]:
        """Return what a sweep that is gone on with must have in common with this one, as JSON has it."""
        dimensions = [{**asdict(dimension), "choices": list(dimension.choices)} for dimension in self.dimensions]
        for dimension in dimensions:
            if dimension["around"] is None:
                del dimension["around"]
        fixed, keys = self.shared_words, ["method"]
        if self.settings["method"] == "pbt":
            keys += ["seed", "num_trials", "pbt"]
        elif self.settings["method"] == "optuna":
            keys += ["seed", "sampler", "pruner", "repeats", "second_objective"]
        else:
            # A study compares jobs of one length.
            fixed = [word for word in fixed if not may_differ(word.lstrip("+").partition("=")[0])]
        return {"fixed": sorted(fixed), "dimensions": dimensions, **{key: self.settings[key] for key in keys}}


def read_sweep(words: Sequence[str]) -> SweepPlan:
    """Read the overrides of a sweep with Hydra's grammar; recipes must be registered.

    Args:
        words: Hydra's command line, without flags.

    Raises:
        ConfigError: they do not compose, or a range stands in a grid.
    """
    with config_errors(), initialize_config_dir(str(package_dir("conf")), **composition.VERSION_KEYWORDS):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(list(words))
        fixed = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
    config = composition.compose_words(fixed)
    composition.finish(config, config.hydra.runtime.choices, fixed)
    with config_errors():
        settings: dict[str, Any] = dict(composition.plain(config.sweep))
        settings |= {key: settings[key] or {} for key in settings if key.endswith("_options")}
        listed = {**(config.hydra.sweeper.get("params") or {}), **(settings["params"] or {})}
        in_line = {override.get_key_element() for override in parsed}
        lines = [f"{key}={value}" for key, value in listed.items() if str(key) not in in_line]
        swept = [*parser.parse_overrides(lines), *(override for override in parsed if override.is_sweep_override())]
        faults = [fault for _, fault in value_faults({"sweep": settings})] or [*sweep_faults({"sweep": settings})]
        faults += filter(None, [name_fault(config.name)])
        if faults:
            raise ConfigError("\n".join(faults))
        dimensions = tuple(
            _with_prior(_dimension(override, settings["method"]), override, config) for override in swept
        )
        plan = SweepPlan(
            # A job is a run: what describes the sweep is none of its overrides.
            fixed=tuple(word for word in fixed if not word.startswith(("sweep=", "sweep."))),
            dimensions=dimensions,
            settings=settings,
            folder=Path(config.hydra.sweep.dir).absolute(),
            name=config.name,
            objective=config.objective,
            mode=_mode(config, dimensions),
            accelerator=config.runner.accelerator,
            devices_per_job=config.runner.devices,
            seed=config.seed,
            last_tick=None if any(dimension.key in _LENGTH for dimension in dimensions) else max_ticks(config),
            listed=tuple(line for line in lines if line.partition("=")[0] in (settings["params"] or {})),
            config=config,
        )
    with open_dict(config):
        del config["hydra"]
    largest = max((len(dimension.choices) for dimension in dimensions), default=0)
    if (size := plan.num_jobs if settings["method"] == "grid" else largest) > MAX_JOBS:
        keys = ", ".join(dimension.key for dimension in dimensions)
        raise ConfigError(
            f"sweep: found a grid of {size:,} jobs ({keys}); expected at most {MAX_JOBS:,}. Leave values out, or draw "
            "some of them: sweep=optuna."
        )
    return plan


def _own(config: Any, dimension: Dimension) -> Any:
    """Return the recipe's own value of what is swept; None where it has none."""
    return OmegaConf.select(config, dimension.name, throw_on_resolution_failure=False, throw_on_missing=False)


def _with_prior(dimension: Dimension, override: Override, config: Any) -> Dimension:
    """Return a dimension whose first draws lie around the recipe's own value, where it is tagged so."""
    value = override.value() if override.is_sweep_override() else None
    if "prior" not in getattr(value, "tags", ()):
        return dimension
    around = _own(config, dimension)
    if not isinstance(value, IntervalSweep) or dimension.fitting(around) is None:
        raise ConfigError(
            f"{dimension.key}: found the tag 'prior' in {override.input_line}, and the recipe's own value {around}; "
            "expected an interval that has this value in it. Widen the interval, or leave the tag out."
        )
    return replace(dimension, around=float(around))


def _mode(config: Any, dimensions: Sequence[Dimension]) -> str | None:
    if any(dimension.key.partition(".")[0] in _DIRECTION for dimension in dimensions):
        return None
    if faults := list(direction_faults(config)):
        raise ConfigError("\n".join(faults))
    return objective_direction(config)


def _dimension(override: Override, method: str) -> Dimension:
    key, line = override.get_key_element(), override.input_line
    if key.lstrip("+").partition(".")[0] == "sweep":
        raise ConfigError(f"{key}: found {line}; expected a key that changes a job. Write {key}=<one value>.")
    if not override.is_sweep_override():
        # `seed: 3` in a recipe's params: one choice.
        return Dimension(key, (override.get_value_element_as_str(),))
    value = override.value()
    unknown = sorted(map(str, set(getattr(value, "tags", ())) - set(TAGS)))
    if unknown:
        raise ConfigError(
            f"{key}: found the tag '{unknown[0]}' in {line}; expected one of {', '.join(TAGS)}. Correct it."
        )
    if isinstance(value, IntervalSweep):
        if method == "grid":
            raise ConfigError(
                f"{key}: found {line} in a grid; expected choices such as {key}=0.01,0.1 or a range. Write them, or "
                "add sweep=optuna, which draws from intervals."
            )
        return _interval(key, override, value)
    if key == "name":
        raise ConfigError(f"name: found {line}; expected a single name, that of the sweep's folder. Start two sweeps.")
    choices = _choices(key, override)
    if isinstance(value, RangeSweep) and not value.shuffle and "log" not in value.tags and len(choices) > 1:
        first, second, *_ = numbers = sorted(map(float, choices))
        whole = all(isinstance(number, int) for number in (value.start, value.stop, value.step))
        return Dimension(key, choices, first, numbers[-1], second - first, whole=whole)
    return Dimension(key, choices)


def _choices(key: str, override: Override) -> tuple[str, ...]:
    """Return the values of a key, which are at least one, each once; of a range not all where it has too many."""
    choices = tuple(islice(override.sweep_string_iterator(), MAX_JOBS + 1))
    twice = [choice for choice, count in Counter(choices).items() if count > 1]
    if not choices or twice:
        what = f"{twice[0]} twice" if twice else "no value"
        raise ConfigError(f"{key}: found {what} in {override.input_line}; expected each job once. Correct it.")
    return choices


def _interval(key: str, override: Override, value: IntervalSweep) -> Dimension:
    assert value.start is not None and value.end is not None
    low, high, log = float(value.start), float(value.end), "log" in value.tags
    if low >= high or (log and low <= 0):
        raise ConfigError(
            f"{key}: found {override.input_line}; expected an interval from a smaller to a larger "
            f"number{', both positive, as it is tagged log' if log else ''}. Write {key}=interval(0.001,0.1)."
        )
    # `int(interval(1, 10))` makes the ends whole numbers; `tag(int, ...)` says the same.
    whole = "int" in value.tags or (isinstance(value.start, int) and isinstance(value.end, int))
    if describe_type(key).startswith("a whole number") and not whole:
        if low.is_integer() and high.is_integer():
            return Dimension(key, (), low, high, log=log, whole=True)
        raise ConfigError(
            f"{key}: found {override.input_line}, from which numbers with a fraction are drawn; expected whole ones. "
            f"Write '{key}=int(interval({low:.0f},{high:.0f}))'."
        )
    return Dimension(key, (), low, high, log=log, whole=whole)


# So many values of a sweep are looked at, each in a config of its own.
MAX_LOOKED_AT = 200


def check_first_point(plan: SweepPlan) -> None:
    """Refuse a sweep whose keys there are not, or whose intervals begin where no value may be.

    What is wrong with these is wrong with all jobs. A choice that is wrong fails in a job of its own, as others may be
    right.

    Raises:
        ConfigError: with what is wrong.
    """
    ranges = [dimension for dimension in plan.dimensions if not dimension.choices]
    of_all = ("sweep.", *(f"{dimension.key.lstrip('+')}: " for dimension in ranges))
    faults = list[str]()
    with _noted(faults):
        check(job_config(plan, plan.first_words))
    if shared := [fault for fault in faults if fault.startswith(of_all)]:
        raise ConfigError("\n".join(shared))


def choice_faults(plan: SweepPlan) -> list[str]:
    """Return what is wrong with the values of a sweep, each beside the first ones of the other keys."""
    words, faults, first = [*plan.shared_words, *plan.first_words], list[str](), None
    with _noted(faults):
        first = job_config(plan, plan.first_words)
        check(first)
    for number, word in islice(_others(plan), MAX_LOOKED_AT):
        place = len(plan.shared_words) + number
        changed = [*words[:place], word, *words[place + 1 :]]
        with _noted(faults):
            is_alone = first is not None and composition.is_apart(changed, place)
            varied = composition.with_values(first, [word]) if is_alone else None
            check(composition.compose(None, changed) if varied is None else varied)
    return list(dict.fromkeys(faults))


def job_config(plan: SweepPlan, own: Sequence[str]) -> DictConfig:
    """Return the config of a job, which Hydra composes only where the job's own overrides set more than values.

    Args:
        plan: the sweep.
        own: what the job overrides beside what all jobs share.

    Raises:
        ConfigError: it does not compose.
    """
    words = [*plan.shared_words, *own]
    is_apart = all(composition.is_apart(words, place) for place in range(len(plan.shared_words), len(words)))
    config = composition.with_values(plan.config, own) if plan.config is not None and is_apart else None
    return composition.compose(None, words) if config is None else config


def _others(plan: SweepPlan) -> Iterator[tuple[int, str]]:
    """Yield the values after the first ones, with the places of their keys; of an interval its other end."""
    for place, dimension in enumerate(plan.dimensions):
        values = dimension.choices[1:]
        if not dimension.choices and dimension.high is not None:
            values = (str(int(dimension.high) if dimension.whole else dimension.high),)
        for value in values:
            yield place, f"{dimension.key}={value}"


@contextmanager
def _noted(faults: list[str]) -> Iterator[None]:
    """Add what is wrong to a list."""
    try:
        yield
    except ConfigError as error:
        faults += str(error).splitlines()
