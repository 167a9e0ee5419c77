"""Private names of torch and Lightning stand in few files, which docs/dependencies.md lists with the tests of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = re.compile(
    r"(?:from|import) (?:torch|pytorch_lightning)(?:\.\w+)*\._\w+|\btorch(?:\.\w+)*\._(?!_|foreach_|fused_)\w+"
    r"|from torch[\w.]* import [^\n]*\b_[a-z]\w*|pytorch_lightning[\w.]*\._\w+"
)


def users() -> set[str]:
    """Return the files of mlotool that use a private name."""
    files = sorted((ROOT / "mlotool").rglob("*.py"))
    return {file.relative_to(ROOT / "mlotool").as_posix() for file in files if NAME.search(file.read_text())}


def test_what_finds_them() -> None:
    for line in ("import torch._inductor", "x = torch._C._nn", "from torch.utils import _pytree as pytree"):
        assert NAME.search(line)
    for line in (
        "torch._foreach_add(a, b)",
        "torch.__version__",
        "from torch import nn",
        "from torch.nn import Module",
    ):
        assert not NAME.search(line)


def test_each_file_is_listed_with_tests_that_are_there() -> None:
    table = (ROOT / "docs" / "dependencies.md").read_text().partition("## Private names")[2]
    assert users() == set(re.findall(r"`(\w+(?:/\w+)+\.py)`", table.partition("| file |")[2]))
    assert len(users()) <= 20
    tests = re.findall(r"tests/[\w/]+\.py", table)
    assert tests
    assert [test for test in tests if not (ROOT / test).is_file()] == []
