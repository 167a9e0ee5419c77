"""`mlotool validate` refuses the values of a sweep that `run -m` refuses, or one of whose jobs would fail."""

from tests.cli.conftest import Call, Recipe

RATE = "problems.classifier.optimizer.lr"
WRONG = {
    "an interval in a grid": ("params: {seed: 'interval(1,2)'}", "seed=interval(1,2)"),
    "a second choice": ("params: {seed: '1,x'}", "'x'"),
    "a key": ("params: {runner.max_tick: '1,2'}", "runner.max_tick"),
    "an option of a group": ("params: {data: 'digits,digitz'}", "Did you mean 'digits'?"),
    "too many": ("params: {seed: 'range(0,1e30)'}", "100000"),
    "the wrong way round": (f"method: optuna, params: {{{RATE}: 'interval(2,1)'}}", RATE),
    "the near end": (f"method: optuna, params: {{{RATE}: 'interval(-1,1)'}}", f"{RATE}: found -1.0"),
    "two seeds": ("method: optuna, repeats: 2, params: {seed: '1,2'}", "seed"),
    "every value": (f"method: optuna, sampler: brute_force, params: {{{RATE}: 'interval(1,2)'}}", RATE),
}


def test_refused(call: Call, recipe: Recipe) -> None:
    for place, (sweep, message) in enumerate(WRONG.values()):
        code, _, err = call("validate", str(recipe(f"sweep: {{{sweep}}}", f"wrong{place}")))
        assert code == 2, sweep
        assert message in err


def test_all_values_at_once(call: Call, recipe: Recipe) -> None:
    code, _, err = call("validate", str(recipe(f"sweep: {{params: {{seed: '0,-1,-2', {RATE}: '0.1,-0.1'}}}}")))
    assert code == 2
    assert [line.partition(";")[0].removeprefix("mlotool: error: ") for line in err.splitlines()] == [
        "seed: found -1",
        "seed: found -2",
        f"{RATE}: found -0.1",
    ]


RIGHT = (
    f"params: {{{RATE}: 'range(0.1,0.5,0.1)', data: 'digits,digits_noisy'}}",
    f"method: optuna, params: {{{RATE}: 'tag(log, interval(1e-3,1))'}}",
    "method: optuna, repeats: 2, params: {problems.classifier.stream.batch_size: 'int(interval(1,9))'}",
    "fuse: 2, params: {seed: 3}",
)


def test_accepted(call: Call, recipe: Recipe) -> None:
    for place, sweep in enumerate(RIGHT):
        code, out, err = call("validate", str(recipe(f"sweep: {{{sweep}}}", f"right{place}")))
        assert code == 0, err
        assert "is valid" in out
