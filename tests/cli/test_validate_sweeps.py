"""`mlotool validate` refuses the values of a sweep that `run -m` refuses, or one of whose jobs would fail."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

RATE = "problems.classifier.optimizer.lr"
WRONG = {
    "an interval in a grid": ("params: {seed: 'interval(1,2)'}", "seed: found seed=interval(1,2) in a grid"),
    "a second choice": ("params: {seed: '1,x'}", "seed: found 'x'; expected a whole number"),
    "a third choice": (f"params: {{{RATE}: '0.1,0.2,-0.3'}}", f"{RATE}: found -0.3; expected a number of at least 0"),
    "a key": ("params: {runner.max_tick: '1,2'}", "runner.max_tick: unknown key"),
    "an option of a group": ("params: {data: 'digits,digitz'}", "Did you mean 'digits'?"),
    "the same twice": ("params: {seed: '1,2,1'}", "seed: found 1 twice"),
    "no step": ("params: {seed: 'range(0,9,0)'}", "seed: found the step 0"),
    "too many": ("params: {seed: 'range(0,1e30)'}", "expected at most 100000"),
    "the wrong way round": (f"method: optuna, params: {{{RATE}: 'interval(2,1)'}}", "from a smaller to a larger"),
    "the far end": (f"method: optuna, params: {{{RATE}: 'interval(0,1e400)'}}", f"{RATE}: found inf"),
    "the near end": (f"method: optuna, params: {{{RATE}: 'interval(-1,1)'}}", f"{RATE}: found -1.0"),
    "fractions": ("method: optuna, params: {seed: 'interval(0.5,2)'}", "seed: found seed=interval(0.5,2), from which"),
    "a tag": ("method: optuna, params: {seed: 'tag(lg, interval(1,2))'}", "the tag 'lg'"),
    "two seeds": ("method: optuna, repeats: 2, params: {seed: '1,2'}", "beside a seed that is searched"),
    "every value": (f"method: optuna, sampler: brute_force, params: {{{RATE}: 'interval(1,2)'}}", "tries every value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(call: Callable[..., Result], recipe: Callable[..., Path], name: str) -> None:
    sweep, message = WRONG[name]
    code, _, err = call("validate", str(recipe(f"sweep: {{{sweep}}}")))
    assert code == 2
    assert message in err


def test_all_values_at_once(call: Callable[..., Result], recipe: Callable[..., Path]) -> None:
    code, _, err = call("validate", str(recipe(f"sweep: {{params: {{seed: '0,-1,-2', {RATE}: '0.1,-0.1'}}}}")))
    assert code == 2
    assert [line.partition(";")[0].removeprefix("mlotool: error: ") for line in err.splitlines()] == [
        "seed: found -1",
        "seed: found -2",
        f"{RATE}: found -0.1",
    ]


@pytest.mark.parametrize(
    "sweep",
    [
        "params: {seed: '1,2'}",
        f"params: {{{RATE}: 'range(0.1,0.5,0.1)', data: 'digits,digits_noisy'}}",
        f"method: optuna, params: {{{RATE}: 'tag(log, interval(1e-3,1))'}}",
        "method: optuna, repeats: 2, params: {problems.classifier.stream.batch_size: 'int(interval(1,9))'}",
        "fuse: 2, params: {seed: 3}",
    ],
)
def test_accepted(call: Callable[..., Result], recipe: Callable[..., Path], sweep: str) -> None:
    code, out, err = call("validate", str(recipe(f"sweep: {{{sweep}}}")))
    assert code == 0, err
    assert "is valid" in out
