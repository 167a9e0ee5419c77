"""Programs with code of a user's around them, trained in several ways, each beside plain torch."""

import io
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional

from mlotool import Graph, Implicit, Problem, Program, Schedule, Stream, losses
from mlotool.core.errors import MlotoolError
from mlotool.fusion.fused_ticks import FusedTicks
from tests.user_code.actions import MODES
from tests.user_code.programs import SOLVERS, Case, State, by_hand

NUM_MEMBERS, LARGEST_DIFFERENCE = 3, 1e-9
_EXCUSES = re.compile(
    r"not (be )?(called|seen|supported|taken into account|counted|noticed|looked at)|is ignored|may have been wrong"
)
"""A warning excuses a difference if it says that something does not count; not if it says how the run goes on."""


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

    @cached_property
    def expected(self) -> list[State]:
        """What each of its runs comes to by plain torch."""
        return [by_hand(self.case(member)) for member in range(NUM_MEMBERS if self.case().mode == "fused" else 1)]

    def results(self) -> list[Result]:
        """Return how the program does in the ways of its mode."""
        case = self.case()
        stop = case.chance.randrange(1, self.ticks)
        if case.mode == "fused":
            return [self._fused_ticks()]
        traces = ("auto",) if case.mode == "auto" else (None, "eager")
        return [self._in_python(trace, stop if case.mode == "resumed" else 0) for trace in traces]

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

        return _judged(f"from Python, trace={trace}, stopped at {stop}", run, self.expected, cases)

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

        return _judged("fused ticks", run, self.expected, cases)


def _parts(schedule: Schedule) -> list[Any]:
    return [schedule.program, schedule, schedule.program.random]


def _ticked(case: Case, schedule: Schedule, begin: int, end: int) -> State:
    case.between(begin, is_resumed=begin > 0)
    for tick in range(begin, end):
        schedule.tick()
        case.between(tick + 1)
    return case.state()


def program_of(case: Case, trace: str | None = None) -> Program:
    """Return the program of a case; traced unasked (auto), losses without transforms are mlotool's own."""
    given: dict[str, Any] = {"trace": trace}
    loss, upper_loss = case.loss(), plain
    if trace == "auto":
        given = {"trace": "eager", "trace_from": 12, "traces_users_code": False}
        own: Any = (
            partial(losses.reweighted_cross_entropy, normalize=False) if case.is_bilevel else losses.cross_entropy
        )
        loss, upper_loss = loss if case.transforms else own, losses.cross_entropy
    lower = Problem(
        "model",
        case.module,
        loss,
        roles={"model": "model"} | ({"weigher": "weigher"} if case.is_bilevel else {}),
        stream=Stream(case.train, 8, shuffle=False),
        optimizer=case.make_optimizer,
        scheduler=case.scheduler,
        hypergradient=Implicit(SOLVERS[case.solver]) if case.is_bilevel else None,
        unroll_steps=case.unroll_steps,
    )
    if not case.is_bilevel:
        return Program([lower], Graph(), **given)
    stream, make = Stream(case.meta, 8, shuffle=False), case.make_upper_optimizer
    upper = Problem("weigher", case.weigher, upper_loss, roles={"model": "model"}, stream=stream, optimizer=make)
    return Program([lower, upper], Graph({"weigher": ["model"]}, {"model": ["weigher"]}), **given)


def plain(batch: Any, *, model: Any) -> Any:
    return functional.cross_entropy(model(batch["input"]), batch["target"])


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
