"""What a command line with -m asks for: fixed overrides, and the choices and ranges to go through."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, open_dict

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

# Of an interval: drawn by its logarithm, and whole numbers.
TAGS = ("log", "int")

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
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    whole: bool = False

    @property
    def first(self) -> str:
        """Its first value, as it stands behind the `=`."""
        if self.choices:
            return self.choices[0]
        assert self.low is not None
        return str(int(self.low)) if self.whole else str(self.low)


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
        if self.settings["method"] == "optuna":
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

    def identity(self) -> dict[str, Any]:
        """Return what a sweep that is gone on with must have in common with this one, as JSON has it."""
        dimensions = [{**asdict(dimension), "choices": list(dimension.choices)} for dimension in self.dimensions]
        fixed, keys = self.shared_words, ["method"]
        if self.settings["method"] == "optuna":
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
        dimensions = tuple(_dimension(override, settings["method"]) for override in swept)
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
        raise ConfigError(f"{key}: found the tag '{unknown[0]}' in {line}; expected log or int. Correct it.")
    if isinstance(value, IntervalSweep):
        if method == "grid":
            raise ConfigError(
                f"{key}: found {line} in a grid; expected choices such as {key}=0.01,0.1 or a range. Write them, or "
                "add sweep=optuna, which draws from intervals."
            )
        return _interval(key, override, value)
    if key == "name":
        raise ConfigError(f"name: found {line}; expected one name, that of the sweep's folder. Start two sweeps.")
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
