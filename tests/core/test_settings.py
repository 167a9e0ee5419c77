"""Annotations say what a setting is: to Python, to messages and to editors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import pytest
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.settings import NODE, Count, Positive, Shape, Share, checked, fits, json_schema, parameters


class Noise(TypedDict):
    kind: Literal["uniform", "flip"]
    rate: Share


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, int, True),
        (np.int64(1), int, True),
        (True, int, False),
        (1, float, True),
        (np.float32(0.5), Positive, True),
        (0, Count, False),
        (float("nan"), Positive, False),
        ("x", float | None, False),
        (None, float | None, True),
        ("x", float | Tensor, False),
        ([1, 2], Sequence[int], True),
        ([1, "x"], Sequence[int], False),
        ([], Shape, False),
        ([0.9, 0.99], tuple[float | Tensor, float | Tensor], True),
        ([0.9], tuple[float, float], False),
        ("ab", Sequence[str], False),
        ({"a": 1}, Mapping[str, int], True),
        ({"a": "x"}, Mapping[str, int], False),
        ({"kind": "flip", "rate": 1.0}, Noise, True),
        ({"kind": "flip", "rate": 2.0}, Noise, False),
        ("a", Literal["a", "b"], True),
        (1, Literal[True], False),
        ("x", nn.Module, False),
        (len, Callable[..., Any], True),
        ("x", Any, True),
    ],
)
def test_what_fits(value: Any, annotation: Any, expected: bool) -> None:
    assert fits(value, annotation) is expected


def test_a_node_fits_where_a_config_stands_for_what_it_builds() -> None:
    node = {"_target_": "mlotool.models.WeightNet"}
    assert fits(node, nn.Module, nodes=True)
    assert fits([node], Sequence[nn.Module], nodes=True)
    assert not fits(node, nn.Module)


def test_json_schema_has_ranges_and_choices() -> None:
    assert json_schema(Share | None)["anyOf"][:2] == [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]
    noise, shape, pair = (json_schema(kind)["anyOf"][0] for kind in (Noise, Shape, tuple[float, float]))
    assert noise["properties"]["kind"]["anyOf"][0] == {"enum": ["uniform", "flip"]}
    assert noise["additionalProperties"] is False
    assert shape["minItems"] == 1 and pair["minItems"] == pair["maxItems"] == 2
    # What no text can be is built from a node.
    assert [json_schema(kind)["anyOf"][0] for kind in (nn.Module, Tensor, Any)] == [NODE, NODE, {}]


def test_arguments_are_checked_wherever_they_stand() -> None:
    @checked
    class Layer:
        def __init__(self, width: Count, *, rate: Positive = 1.0) -> None:
            self.width = width

    class Wide(Layer):
        pass

    assert Layer(3).width == 3
    assert list(parameters(Layer)) == ["width", "rate"]
    for make in (lambda: Layer(0), lambda: Wide(width=0), lambda: Layer(1, rate=0.0)):
        with pytest.raises(ConfigError, match=r"(Layer|Wide)\.(width|rate): found 0"):
            make()


def test_a_name_that_only_type_checkers_know_is_left_open() -> None:
    def loss(batch: Any, scale: "Count", other: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    found = parameters(loss)
    assert found["scale"].annotation == Count
    assert found["other"].annotation is found["other"].empty
