"""Keys below a node that is null, into which OmegaConf cannot merge."""

import pytest

from mlotool.config import compose
from tests.config.conftest import message_of


def test_keys_are_set_below_what_a_recipe_leaves_null() -> None:
    words = ["evaluate=null", "evaluate.problem=classifier", "evaluate={splits: {val: 9}}", "evaluate.batch_size=5"]
    evaluate = compose("mwn", words).evaluate
    assert (evaluate.problem, evaluate.splits, evaluate.batch_size) == ("classifier", {"val": 9}, 5)
    stream = compose("mwn", ["problems.classifier.stream=null", "+problems.classifier.stream.split=val"])
    assert stream.problems.classifier.stream.split == "val"


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("evaluate.bogus=1", "evaluate.bogus: unknown key"),
        ("evaluate.batch_size=many", "evaluate.batch_size: found 'many'"),
        ("problems.clasifier.stream.split=val", "Did you mean 'classifier'?"),
    ],
)
def test_what_does_not_fit_is_refused(word: str, part: str) -> None:
    assert part in message_of(compose, "mwn", [word])
