"""What is read from source is what inspect finds."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.signatures import describe, fits, keyword_faults, public_names, read_signature
from mlotool.config.trusted import resolve, trusted_names

OWN = [name for name in trusted_names() if name.startswith("mlotool.") and not inspect.isabstract(resolve("key", name))]


@pytest.mark.parametrize("name", OWN)
def test_source_and_inspect_agree(name: str) -> None:
    read = read_signature(name)
    assert read is not None
    if read.is_open:
        return
    found = inspect.signature(resolve("key", name)).parameters.values()
    assert [(each.name, each.is_required) for each in read.parameters] == [
        (each.name, each.default is each.empty) for each in found
    ]
    assert [each.is_keyword_only for each in read.parameters] == [each.kind is each.KEYWORD_ONLY for each in found]


def test_roles_are_told_from_settings() -> None:
    signature = read_signature("mlotool.losses.reweighted_cross_entropy")
    assert signature is not None
    assert [each.name for each in signature.parameters if each.is_role] == ["model", "weigher"]


def test_public_names_are_those_of_the_module() -> None:
    import mlotool.models

    assert public_names("mlotool.models") == tuple(mlotool.models.__all__)
    assert public_names("mlotool.nothing") == ()


def test_source_is_followed_through_imports_and_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "follow_me.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from typing import ClassVar\n"
        "if True:\n    class Base:\n        def __init__(self, a: int, *, b: 'float' = 1.0): ...\n"
        "class Child(Base): ...\n"
        "class Foreign(Elsewhere): ...\n"
        "def anything(a, **rest): ...\n"
        "@dataclass\nclass First:\n    x: int\n    kind: ClassVar[int] = 1\n"
        "@dataclass(frozen=True)\nclass Second(First):\n    y: int = 2\n    z: int = field(init=False, default=3)\n"
    )

    def names(target: str) -> tuple[list[str], bool]:
        signature = read_signature(f"follow_me.{target}")
        assert signature is not None
        return [each.name for each in signature.parameters], signature.is_open

    assert names("Child") == (["a", "b"], False)
    assert names("Foreign") == ([], True)
    assert names("anything") == (["a"], True)
    assert names("Second") == (["x", "y"], False)
    assert read_signature("follow_me.nothing") is None
    assert "follow_me" not in sys.modules


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, "int", True),
        (True, "int", False),
        (1.0, "int", False),
        (1, "float", True),
        ("x", "float | None", False),
        (None, "float | None", True),
        (None, "Optional[float]", True),
        ("x", "float | torch.Tensor", False),
        ("x", "ParamsT", True),
        ([1, 2], "Sequence[int]", True),
        ([1, "x"], "Sequence[int]", False),
        ([0.9, 0.99], "tuple[float | Tensor, float | Tensor]", True),
        ([], "tuple[int, ...]", True),
        (1, "list", False),
        ({"a": 1}, "Mapping[str, int]", True),
        ({"a": "x"}, "Mapping[str, int]", False),
        ({"_target_": "x"}, "AbstractSolver", True),
        ("x", "AbstractSolver", False),
        ("a", "Literal['a', 'b']", True),
        ("c", "Literal['a', 'b']", False),
        ("x", "Union[int, str]", True),
        ("x", None, True),
        ("x", "not python (", True),
    ],
)
def test_literals_fit_annotations(value: Any, annotation: str | None, expected: bool) -> None:
    assert fits(value, annotation) is expected


def test_annotations_in_words() -> None:
    assert describe("int") == "a whole number"
    assert describe("float | None") == "a number or null"
    assert describe("Sequence[int]") == "a list of whole numbers"


def test_a_setting_by_position_and_by_name() -> None:
    node = {"_target_": "mlotool.models.WeightNet", "_args_": [10], "hidden": 20}
    signature = read_signature("mlotool.models.WeightNet")
    assert signature is not None
    [fault] = keyword_faults("key", node, signature)
    assert "key.hidden: found 20, and one in _args_" in fault
