from pathlib import Path

import pytest

from mlotool.config import register_sources
from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan, read_sweep
from mlotool.core.errors import ConfigError


def plan_of(*words: str) -> SweepPlan:
    register_sources()
    return read_sweep(["+recipe=plain", *words])


def test_choices_and_ranges_are_dimensions_and_the_rest_is_fixed() -> None:
    plan = plan_of(
        "sweep=optuna", "data=digits", "seed=range(1,6,2)", "hypergradient=cg,neumann",
        "problems.classifier.optimizer.lr=tag(log, interval(1e-3, 1e-1))", "runner.max_ticks=int(interval(1, 5))",
    )  # fmt: skip
    assert plan.fixed == ("+recipe=plain", "data=digits")
    assert plan.dimensions == (
        Dimension("seed", ("1", "3", "5"), 1, 5, 2, whole=True),
        Dimension("hypergradient", ("cg", "neumann")),
        Dimension("problems.classifier.optimizer.lr", (), 1e-3, 1e-1, log=True),
        Dimension("runner.max_ticks", (), 1, 5, whole=True),
    )
    assert (plan.name, plan.objective, plan.mode) == ("plain", "val/accuracy", "max")
    assert plan.folder.parent == Path("outputs/plain/multirun").absolute()


def test_a_recipe_lists_choices_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "# @package _global_\ndefaults: [plain, _self_]\n"
        "sweep: {params: {problems.classifier.optimizer.lr: 'interval(0.1, 0.2)', seed: '1,2'}, num_trials: 3}\n"
        "hydra: {sweeper: {params: {runner.max_ticks: '5,6'}}}\n"
    )
    register_sources([tmp_path])
    plan = read_sweep(["+recipe=mine", "sweep.method=optuna", "seed=7"])
    assert plan.settings["num_trials"] == 3
    assert plan.dimensions == (
        Dimension("runner.max_ticks", ("5", "6")),
        Dimension("problems.classifier.optimizer.lr", (), 0.1, 0.2),
    )
    assert "seed=7" in plan.fixed


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ((), False),
        (("sweep.workers=2",), True),
        (("sweep.fuse=2",), True),
        (("sweep=optuna",), True),
        (("sweep.launcher=slurm", "sweep.launcher_options={cluster: local}"), True),
    ],
)
def test_plain_grids_run_in_this_process(words: tuple[str, ...], needs: bool) -> None:
    assert plan_of("seed=1,2", *words).needs_processes == needs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("seed=interval(1,2)",), r"seed: found seed=interval\(1,2\) in a grid; expected choices.*sweep=optuna"),
        (("sweep=optuna", "seed=interval(2,1)"), "expected an interval from a smaller to a larger number"),
        (("sweep=optuna", "seed=tag(log, interval(0,1))"), "both positive, as it is tagged log"),
        (("sweep.sampler=tpee",), r"sweep\.sampler: found 'tpee'; expected one of .*Did you mean 'tpe'"),
        (("seed=range(0,2000)", "data.seed=range(0,2000)"), r"sweep: found a grid of 4,000,000 jobs \(seed, data.seed"),
        (("sweep.fuse=0",), r"sweep\.fuse: found 0; expected a whole number of at least 1 and .* or auto"),
        (("sweep.worker=2",), r"sweep\.worker: unknown key.*Did you mean 'workers'"),
    ],
)
def test_what_is_wrong_is_told(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(*words)


ERROR = ("evaluate.metrics=[cross_entropy]", "objective=val/cross_entropy")


def test_the_direction_is_that_of_the_objective() -> None:
    assert plan_of("seed=1,2", *ERROR).mode == "min"
    assert plan_of("objective=val/accuracy,classifier/loss").mode is None
    assert plan_of("seed=1,2", "objective=null").mode is None
    with pytest.raises(ConfigError, match=r"^objective_mode: found "):
        plan_of("seed=1,2", *ERROR, "objective_mode=max")
