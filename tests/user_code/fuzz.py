"""Programs with code of a user's around them, trained in several ways, each beside plain torch."""

import io
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mlotool
from mlotool import Graph, Implicit, Problem, Program, Schedule, Stream
from mlotool.core.errors import Interrupted, MlotoolError
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.runner.together import RunRequest, run_together
from tests.user_code import parts
from tests.user_code.actions import MODES
from tests.user_code.programs import CASES, SOLVERS, STOPS, Case, State, by_hand

NUM_MEMBERS, LARGEST_DIFFERENCE = 3, 1e-9
_EXCUSES = re.compile(
    r"not (be )?(called|seen|supported|taken into account|counted|noticed|looked at)|is ignored|may have been wrong"
)
"""A warning excuses a difference if it says that something does not count; not if it says how the run goes on."""


RECIPE = """\
# @package _global_
name: fuzzed
data: {{_target_: fuzzed.parts.Data, seed: "${{seed}}"}}
problems:
  model:
    module: {{_target_: fuzzed.parts.module, seed: "${{seed}}"}}
    loss: {{_target_: {loss}, roles: {{model: model{weigher}}}{settings}}}
    stream: {{split: train, batch_size: 8, shuffle: false}}
    optimizer: {{_target_: fuzzed.parts.optimizer, seed: "${{seed}}"}}
    scheduler: {{_target_: fuzzed.parts.Ticked, seed: "${{seed}}"}}
{above}\
evaluate: {{problem: model, metrics: [cross_entropy], splits: {{meta: 1000}}}}
runner: {{max_ticks: {ticks}, num_threads: 1, report: false, progress_bar: false, accelerator: cpu}}
logger: {{wandb: false}}
"""
ABOVE = """\
    hypergradient: {solver}
    unroll_steps: {unroll_steps}
  weigher:
    module: {{_target_: fuzzed.parts.weigher, seed: "${{seed}}"}}
    loss: {{_target_: mlotool.losses.cross_entropy, roles: {{model: model}}}}
    stream: {{split: meta, batch_size: 8, shuffle: false}}
    optimizer: {{_target_: torch.optim.Adam, lr: 0.01, eps: 0.001}}
graph: {{upper_to_lower: {{weigher: [model]}}, lower_to_upper: {{model: [weigher]}}}}
"""
_IMPLICIT = "{{_target_: mlotool.hypergradient.Implicit, solver: {{_target_: mlotool.hypergradient.{}}}}}"
_SOLVERS = {"identity": "Identity, step_size: 0.1", "neumann": "Neumann, num_terms: 3, step_size: 0.05"}


@dataclass
class Result:
    """How a program has done in one way.

    Args:
        way: in words.
        difference: the largest relative one of a tensor.
        messages: warnings and lines of the log.
        error: that has ended it.
    """

    way: str
    difference: float = 0.0
    messages: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def is_right(self) -> bool:
        if self.error is not None:
            # Nobody has asked for a trace that ends a run.
            is_of_trace = "traced steps differ" in str(self.error) and "eager" not in self.way
            is_refusal = isinstance(self.error, MlotoolError) and isinstance(self.error.__cause__, MlotoolError | None)
            return is_refusal and not is_of_trace
        return self.difference <= LARGEST_DIFFERENCE or any(_EXCUSES.search(each) for each in self.messages)

    def __str__(self) -> str:
        ended = "" if self.error is None else f", {type(self.error).__name__}: {str(self.error)[:300]}"
        said = "".join(f"\n      said: {each[:300]}" for each in dict.fromkeys(self.messages))
        return f"{'right' if self.is_right else 'WRONG'} {self.way}: {self.difference:.1e}{ended}{said}"


@dataclass(frozen=True)
class Fuzzed:
    """A program of the fuzz.

    Args:
        number: draws all that is not given.
        ticks: of each run.
        names: of its actions.
        mode: one of MODES; None goes through them by number.
    """

    number: int
    ticks: int
    names: tuple[str, ...] | None = None
    mode: str | None = None

    def case(self, member: int = 0) -> Case:
        mode = self.mode or MODES[self.number % len(MODES)]
        return Case(self.number, self.ticks, mode, member=member, names=self.names)

    def results(self) -> list[Result]:
        """Return how the program does in the ways of its mode."""
        case = self.case()
        stop = case.chance.randrange(1, self.ticks)
        if case.mode == "recipe":
            return [self._by_recipe()]
        if case.mode == "fused":
            return [self._fused_ticks() if case.chance.random() < 0.5 else self._fused_recipes()]
        if case.mode == "resumed" and self.number // len(MODES) % 2:
            return [self._resumed_recipe(stop)]
        return [self._in_python(trace, stop if case.mode == "resumed" else 0) for trace in (None, "eager")]

    def _in_python(self, trace: str | None, stop: int) -> Result:
        """Train by a schedule from Python, stopped once unless at 0."""
        cases = [self.case(), self.case()]

        def run() -> list[State]:
            schedule = Schedule(program_of(cases[0], trace))
            if not stop:
                return [_ticked(cases[0], schedule, 0, self.ticks)]
            _ticked(cases[0], schedule, 0, stop)
            cases[0].close()
            file, again = io.BytesIO(), Schedule(program_of(cases[1], trace))
            torch.save([each.state_dict() for each in _parts(schedule)], file)
            file.seek(0)
            for part, state in zip(_parts(again), torch.load(file, weights_only=True), strict=True):
                part.load_state_dict(state)
            return [_ticked(cases[1], again, stop, self.ticks)]

        return _judged(f"from Python, trace={trace}, stopped at {stop}", run, [by_hand(self.case())], cases)

    def _by_recipe(self) -> Result:
        case = self.case()

        def run() -> list[State]:
            with _recipe([case]) as compose:
                mlotool.run(compose(), output_dir=Path("run"))
            return [case.state()]

        return _judged("recipe", run, [by_hand(self.case(), after_step=True)], [case])

    def _resumed_recipe(self, stop: int) -> Result:
        cases = [self.case(), self.case()]

        def run() -> list[State]:
            with _recipe(cases[:1]) as compose:
                STOPS[0] = stop
                try:
                    mlotool.run(compose(), output_dir=Path("run"))
                except Interrupted:
                    cases[0].close()
                    CASES[0] = cases[1]
                    mlotool.run(compose(), resume=Path("run"))
            return [cases[1].state()]

        return _judged(f"recipe, stopped at {stop}", run, [by_hand(self.case(), after_step=True)], cases)

    def _fused_ticks(self) -> Result:
        cases = [self.case(member) for member in range(NUM_MEMBERS)]

        def run() -> list[State]:
            together = FusedTicks(dict.fromkeys(range(NUM_MEMBERS), "the same"))
            for number, case in enumerate(cases):
                together.join(number, Schedule(program_of(case)))
                case.between(0)
            for tick in range(self.ticks):
                if tick % 50 == 0:
                    together.begin(range(NUM_MEMBERS))
                for outcome in together.tick(range(NUM_MEMBERS)).values():
                    if isinstance(outcome, Exception):
                        raise outcome
                for case in cases:
                    case.between(tick + 1)
            return [case.state() for case in cases]

        return _judged("fused ticks", run, [by_hand(self.case(number)) for number in range(NUM_MEMBERS)], cases)

    def _fused_recipes(self) -> Result:
        cases, ended = [self.case(member) for member in range(NUM_MEMBERS)], dict[int, Any]()

        def run() -> list[State]:
            with _recipe(cases) as compose:
                requests = [RunRequest(compose(f"seed={number}"), Path(str(number))) for number in range(NUM_MEMBERS)]
                run_together(requests, record=None, when_ended=ended.__setitem__)
            for error in [each for each in ended.values() if isinstance(each, BaseException)]:
                raise error
            return [case.state() for case in cases]

        expected = [by_hand(self.case(number), after_step=True) for number in range(NUM_MEMBERS)]
        return _judged("fused recipes", run, expected, cases)


def _parts(schedule: Schedule) -> list[Any]:
    return [schedule.program, schedule, schedule.program.random]


def _ticked(case: Case, schedule: Schedule, begin: int, end: int) -> State:
    case.between(begin, is_resumed=begin > 0)
    for tick in range(begin, end):
        schedule.tick()
        case.between(tick + 1)
    return case.state()


def program_of(case: Case, trace: str | None = None) -> Program:
    problems = [
        Problem(
            "model",
            case.module,
            case.loss(),
            roles={"model": "model"} | ({"weigher": "weigher"} if case.is_bilevel else {}),
            stream=Stream(case.train, 8, shuffle=False),
            optimizer=case.make_optimizer,
            scheduler=case.scheduler,
            hypergradient=Implicit(SOLVERS[case.solver]) if case.is_bilevel else None,
            unroll_steps=case.unroll_steps,
        )
    ]
    if not case.is_bilevel:
        return Program(problems, Graph(), trace=trace)
    stream, make = Stream(case.meta, 8, shuffle=False), case.make_upper_optimizer
    upper = Problem("weigher", case.weigher, parts.plain, roles={"model": "model"}, stream=stream, optimizer=make)
    return Program([*problems, upper], Graph({"weigher": ["model"]}, {"model": ["weigher"]}), trace=trace)


@contextmanager
def _recipe(cases: list[Case]) -> Iterator[Callable[..., Any]]:
    """Work in a folder with the recipe of cases and a package of the user's; yield what composes it."""
    home, path = Path.cwd(), [*sys.path]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        CASES.update(enumerate(cases))
        try:
            Path("fuzzed").mkdir()
            Path("fuzzed/__init__.py").touch()
            Path("fuzzed/parts.py").write_text(Path(parts.__file__).read_text())
            Path("mine.yaml").write_text(recipe_of(cases[0]))
            yield lambda *words: mlotool.compose("mine.yaml", [*words], trust=["fuzzed"])
        finally:
            os.chdir(home)
            sys.path[:] = path
            CASES.clear()
            STOPS.clear()
            for name in [each for each in sys.modules if each.partition(".")[0] == "fuzzed"]:
                del sys.modules[name]


def recipe_of(case: Case) -> str:
    """Return the recipe of a case; a loss without transforms is mlotool's own. A scheduler runs the user's code."""
    is_users, is_bilevel = bool(case.transforms), case.is_bilevel
    kind = "reweighted_cross_entropy" if is_bilevel else "cross_entropy"
    solver = _IMPLICIT.format(_SOLVERS[case.solver])
    return RECIPE.format(
        loss=f"fuzzed.parts.{kind}" if is_users else f"mlotool.losses.{kind}",
        settings=', seed: "${seed}"' if is_users else ", normalize: false" if is_bilevel else "",
        weigher=", weigher: weigher" if is_bilevel else "",
        above=ABOVE.format(solver=solver, unroll_steps=case.unroll_steps) if is_bilevel else "",
        ticks=case.ticks,
    )


def _judged(way: str, run: Callable[[], list[State]], expected: list[State], cases: list[Case]) -> Result:
    """Return how far what runs come to is from what is expected, with all that was said."""
    result, log = Result(way), _Log()
    logging.getLogger("mlotool").addHandler(log)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result.difference = max(map(_difference, run(), expected))
        except (Exception, KeyboardInterrupt) as error:
            result.error = error
    logging.getLogger("mlotool").removeHandler(log)
    for case in cases:
        case.close()
    result.messages = [str(each.message) for each in caught] + log.lines
    return result


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _difference(found: State, expected: State) -> float:
    if found.keys() != expected.keys():
        return float("inf")
    errors = [(found[name] - each).double().norm() / (each.double().norm() + 1e-3) for name, each in expected.items()]
    return float(torch.stack(errors).nan_to_num(float("inf")).max())


def untimed(take: Callable[[], Any], before: Callable[[], None]) -> tuple[float, Any]:
    """Take the place of `stacked_gradients._fastest`: runs are fused whether or not that is faster here."""
    before()
    return 0.0, take()
