"""Private names of torch and Lightning stand in few files, which docs/dependencies.md lists with the tests of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Of Python itself, of named tuples, and of Hydra, OmegaConf and Optuna.
_OTHERS = "_exit _fields _getframe _replace _run_exitfuncs _shutdown _contains _fixed_params _storage _trial_id"
_OTHERS += " _actions _get_header_dict _get_node _get_parent _list_add_result"
# Attributes of modules that are common knowledge.
_KNOWN = "_buffers _forward_hooks _modules _parameters"


def names(tree: ast.AST) -> Iterator[str]:
    """Yield what code imports, which attributes it reads, and the texts that name one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            parts = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (name for part in parts for name in part.split("."))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("attrgetter", "getattr"):
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield what code gives a name: functions, classes, variables, attributes and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(node, ast.arg):
            yield from (value for key, value in ast.iter_fields(node) if key in ("id", "attr", "arg"))


def users() -> dict[str, set[str]]:
    """Return the private names that files of mlotool use and none of them gives, by file."""
    trees = {file: ast.parse(file.read_text()) for file in sorted((ROOT / "mlotool").rglob("*.py"))}
    ours = {name for tree in trees.values() for name in defined(tree)} | {*_OTHERS.split(), *_KNOWN.split()}
    is_private = re.compile(r"_(?!_|foreach_|fused_)").match
    found = {file: {x for x in names(tree) if is_private(x) and x not in ours} for file, tree in trees.items()}
    return {file.relative_to(ROOT / "mlotool").as_posix(): private for file, private in found.items() if private}


def test_what_finds_them() -> None:
    tree = ast.parse("import torch._inductor\nx._schema\ngetattr(x, '_hooks')\n_own = 1\nself._a = 1")
    assert {name for name in names(tree) if name.startswith("_")} == {"_inductor", "_schema", "_hooks"}
    assert {*defined(tree)} == {"_own", "_a"}


def test_each_file_is_listed_with_its_names_and_tests_that_are_there() -> None:
    table = (ROOT / "docs" / "dependencies.md").read_text().partition("## Private names")[2]
    rows = dict(re.findall(r"^\| `(\w+(?:/\w+)+\.py)` \| ([^|]+) \|", table, re.M))
    assert users().keys() == rows.keys()
    assert [(file, x) for file, private in users().items() for x in private if x not in rows[file]] == []
    assert len(rows) <= 20
    tests = re.findall(r"tests/[\w/]+\.py", table)
    assert tests
    assert [test for test in tests if not (ROOT / test).is_file()] == []
