"""The whole config, checked before anything is built; without torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlotool.config.building import Built, assemble, cut_down
from mlotool.config.check_evaluation import effect_warnings, evaluation_faults, evaluation_warnings
from mlotool.config.check_graph import direction_faults, graph_faults, stream_faults
from mlotool.config.check_targets import target_faults
from mlotool.config.check_values import division_faults, name_faults, nan_faults, sweep_faults
from mlotool.config.dry_parts import construction_faults, machine_faults, part_faults
from mlotool.config.found_decisions import decision_faults
from mlotool.config.hydra_errors import config_errors
from mlotool.config.instantiate import instantiate
from mlotool.config.resolve import as_schema, resolve_config
from mlotool.config.schema import value_faults
from mlotool.config.user_data import built_data
from mlotool.core.errors import ConfigError
from mlotool.core.messages import fault_list

if TYPE_CHECKING:
    from mlotool.config.user_data import SharedData
    from mlotool.problem.rank_mean import Reduce

Values = Mapping[str, Any]


def check(config: Any, targets: bool = False, machine: bool = False, *, parts: bool = False) -> list[str]:
    """Check a config as a whole; without `targets` nothing is built, and no target is called.

    Args:
        config: a composed config.
        targets: also compare third-party targets (torch's) with their signatures, which imports them, and build
            optimizers, schedulers and hypergradients once, on a parameter of no problem.
        machine: also ask whether this machine has the GPU, the folders and the files that the config names.
        parts: with `targets`: also build data, modules and the whole program once, as a run does, where they are small
            and their files are there; nothing is downloaded.

    Returns:
        Warnings.

    Raises:
        ConfigError: with every fault found, one a line.
    """
    return checked(config, targets=targets, machine=machine, parts=parts)[1]


def checked(
    config: Any, *, targets: bool, machine: bool = False, parts: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Check a config; return it as plain values, and the warnings."""
    with config_errors():
        values, faults = resolve_config(as_schema(config))
    checks: tuple[Callable[[Values], Iterator[str]], ...] = (
        lambda values: value_faults({key: value for key, value in values.items() if key != "sweep"}),
        name_faults,
        division_faults,
        graph_faults,
        direction_faults,
        stream_faults,
        evaluation_faults,
        sweep_faults,
        decision_faults,
        target_faults,
    )
    faults += [fault for each in checks for fault in each(values)]
    faults += nan_faults(values, faults)
    if machine:
        faults += machine_faults(values)
    if targets:
        faults += construction_faults(values, dict(_hypergradients(values)), faults)
        if parts:
            faults += part_faults(values, faults)
    if faults:
        raise ConfigError(fault_list(list(dict.fromkeys(faults))))
    return values, [*_warnings(values), *evaluation_warnings(values)]


def _warnings(values: Values) -> Iterator[str]:
    data = values["data"]
    if data.get("download") is True:
        yield f"data.download: files that are missing will be downloaded to '{data.get('root')}'."
    yield from effect_warnings(values, dict(_hypergradients(values)))


def _hypergradients(values: Values) -> Iterator[tuple[str, Any]]:
    """Yield the hypergradients that are used, with their keys."""
    is_root_used = False
    for name in values["graph"]["lower_to_upper"]:
        own = values["problems"].get(name, {}).get("hypergradient")
        if own is not None:
            yield f"problems.{name}.hypergradient", own
        else:
            is_root_used = True
    if is_root_used:
        yield "hypergradient", values["hypergradient"]


def build(config: Any, reduce: "Reduce | None" = None, shared: "SharedData | None" = None) -> Built:
    """Build what a config describes, after a check of all of it.

    Args:
        config: a composed config.
        reduce: the mean over the ranks of a run; None in one process.
        shared: the data of other runs of this process, which this one takes where its own would be equal.

    Raises:
        ConfigError: the config is wrong, or a target does not accept its settings.

    Example::

        built = build(compose("mwn"))
        built.program.gradient("reweight")
    """
    values, _ = checked(config, targets=True)

    def make() -> Any:
        return cut_down(values, built_data(partial(instantiate, "data", values["data"]), values["seed"]))

    if shared is None:
        return assemble(values, make(), reduce)
    data = shared.of(values["data"], values["debug"]["limit_samples"], make)
    return replace(assemble(values, data, reduce), data=shared.evaluated(data))
