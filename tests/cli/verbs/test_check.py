import pytest

from mlotool.cli.verbs.check import advice
from mlotool.hypergradient.compare import Response
from tests.cli.conftest import Call

EXACT = Response("most exact", 2.0, 1.0, 0.0, 1.0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # solves that fail, on a network that is far from its solution
def test_a_recipe_is_measured(call: Call) -> None:
    code, out, err = call("check", "mwn", "--ticks", "2", "problems.classifier.module.hidden=[4]", "debug=fast")
    assert code == 0, err
    for word in ("hypergradient of 'reweight' (301 parameters), tick 2", "this recipe's", "normal_cg", "advice: ",
                 "most exact: of the solution, by a converged solve", "slope of the upper loss"):  # fmt: skip
        assert word in out


def test_without_levels_there_is_nothing_to_check(call: Call) -> None:
    code, _, err = call("check", "plain")
    assert code == 2 and "found no edges in" in err


OWN = Response("own", 1.0, 0.2, 0.9, 1.0)
LOOSE = Response("most exact", 1.0, 1.0, 0.0, 1.0, has_converged=False)
ADVICE = {
    "the direction is right": (EXACT, Response("own", 1.0, 0.999, 0.5, 1.0)),
    "hypergradient=cg has 0.99": (EXACT, OWN, Response("cg", 2.0, 0.995, 0.1, 3.0)),
    "hypergradient=fast has 0.99 at 2.0 times":
        (EXACT, OWN, Response("slow", 2.0, 1.0, 0.0, 9.0), Response("fast", 2.0, 0.995, 0.1, 2.0)),
    "no option does better": (EXACT, OWN, Response("cg", note="refused")),
    "is zero or not finite": (EXACT, Response("own", 0.0, None, 1.0, 1.0)),
    "zero or not finite here": (Response("most exact", note="failed"), Response("own", 1.0)),
    "is no true reference": (LOOSE, Response("own", 1.0, 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("expected", ADVICE)
def test_advice(expected: str) -> None:
    assert expected in advice(ADVICE[expected])
