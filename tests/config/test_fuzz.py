"""Anything may stand in a recipe, and on a command line: the loader answers with a config or a ConfigError, soon."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlotool.config import check, check_recipe_file, compose, package_dir, register_sources
from mlotool.config.reading import read_document
from mlotool.core.errors import ConfigError

HEADER = "# @package _global_\n"
SECONDS = 20
"""For one example; most take a hundredth of it, but other processes may share the machine."""

# What gives a mutation a chance to matter: keys and values that mean something here, to Hydra or to OmegaConf.
WORDS = (
    *("_target_", "_args_", "_partial_", "_convert_", "defaults", "hydra", "problems", "data", "loss", "roles", "name"),
    *("graph", "evaluate", "splits", "stream", "logger", "mode", "online", "runner", "seed", "analyses", "groups"),
    *(
        "os.system",
        "torch.load",
        "torch.nn.Linear",
        "mlotool.models.MLP",
        "override /data",
        "/model@data",
        "mwn",
        "???",
    ),
    *("${seed}", "${data}", "${.x}", "${..x}", "${oc.env:HOME}", "${", "$", "}", "\\${seed}", "../x", "/etc", "~", ""),
    *("<<", "*a", "&a", "!!x", "\x00", "\x1b[2J", "\u202e", "é", "_self_", "null", "1e3", "0x", "-", ".", "..", "a.b"),
)
texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=12))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
RECIPES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(package_dir("recipes").glob("*.yaml"))}
overrides = st.one_of(
    st.builds(
        "{}{}={}".format,
        st.sampled_from(("", "+", "++", "~")),
        st.sampled_from((*WORDS, "problems.classifier.unroll_steps", "data.sizes", "runner.max_ticks", "seed", "data")),
        st.one_of(texts, st.integers().map(str), st.sampled_from(("[1,2]", "{a: 1}", "a,b", "'", "range(3)", "null"))),
    ),
    st.text(max_size=20),
)


@contextmanager
def _folder() -> Iterator[Path]:
    here = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(here)
            register_sources()


def _loads(text: str | bytes, words: tuple[str, ...] = ()) -> bool:
    """Say whether a recipe's text loads; anything but a ConfigError or a checked config is an error of the test."""
    with _folder() as folder:
        file = folder / "fuzzed.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        is_ok = _passes(lambda: check_recipe_file(file)) and _passes(lambda: check(compose(str(file), words)))
        left = {path.name for path in folder.rglob("*")}
    assert left == {"fuzzed.yaml"}
    return is_ok


def _passes(function: Callable[[], Any]) -> bool:
    try:
        function()
    except ConfigError as error:
        assert str(error)
        return False
    return True


def _mutated(text: str, changes: list[tuple[int, int, str]]) -> str:
    for start, length, inserted in changes:
        place = start % (len(text) + 1)
        text = text[:place] + inserted + text[place + length :]
    return text


def _replaced(text: str, choices: list[tuple[int, Any]]) -> str:
    """Put other trees in the place of a recipe's values."""
    data = yaml.safe_load(text)
    for choice, tree in choices:
        nodes = [node for node in _nodes(data) if node]
        node = nodes[choice % len(nodes)] if nodes else data
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        node[keys[choice % len(keys)]] = tree
    return HEADER + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _nodes(node: Any) -> Iterator[Any]:
    if isinstance(node, dict | list):
        yield node
        for child in node.values() if isinstance(node, dict) else node:
            yield from _nodes(child)


_any_tree = given(tree=st.one_of(trees, st.dictionaries(texts, trees, max_size=5)))
_any_bytes = given(
    content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda each: each.encode("utf-8", "replace")))
)
_mutations = given(
    name=st.sampled_from(sorted(RECIPES)),
    changes=st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 30), texts), min_size=1, max_size=4),
)
_replacements = given(
    name=st.sampled_from(sorted(RECIPES)),
    choices=st.lists(st.tuples(st.integers(0, 200), trees), min_size=1, max_size=3),
)
_command_lines = given(words=st.lists(overrides, min_size=1, max_size=3))


def _few(num_examples: int) -> settings:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=num_examples, deadline=SECONDS * 1000, derandomize=True, database=None, suppress_health_check=quiet
    )


def check_tree(tree: Any) -> None:
    _loads(HEADER + yaml.safe_dump(tree, allow_unicode=True))


def check_bytes(content: bytes) -> None:
    _loads(content)
    _loads(HEADER.encode() + content)


def check_mutation(name: str, changes: list[tuple[int, int, str]]) -> None:
    _loads(_mutated(RECIPES[name], changes))


def check_replacement(name: str, choices: list[tuple[int, Any]]) -> None:
    _loads(_replaced(RECIPES[name], choices))


def check_command_line(words: list[str]) -> None:
    with _folder():
        _passes(lambda: check(compose("plain", words)))


KINDS = [
    pytest.param(check_tree, _any_tree, 40, id="trees"),
    pytest.param(check_bytes, _any_bytes, 40, id="bytes"),
    pytest.param(check_mutation, _mutations, 15, id="mutated-recipes"),
    pytest.param(check_replacement, _replacements, 15, id="replaced-values"),
    pytest.param(check_command_line, _command_lines, 15, id="command-lines"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("check_one", "strategy", "num_examples"), KINDS)
def test_no_traceback(check_one: Callable[..., None], strategy: Any, num_examples: int) -> None:
    _few(num_examples)(strategy(check_one))()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("check_one", "strategy", "num_examples"), KINDS)
def test_no_traceback_in_many(check_one: Callable[..., None], strategy: Any, num_examples: int) -> None:
    _few(num_examples * 20)(strategy(check_one))()


@pytest.mark.parametrize("name", ["plain", "mwn"])
def test_the_harness_lets_a_recipe_through(name: str) -> None:
    assert _loads(RECIPES[name])
    assert _loads(_mutated(RECIPES[name], [(len(HEADER), 0, "# A comment.\n")]))
    assert not _loads(_mutated(RECIPES[name], [(0, len(HEADER), "")]))


@settings(max_examples=60, deadline=SECONDS * 1000, derandomize=True, database=None)
@given(tree=st.dictionaries(st.text("abc_", min_size=1, max_size=3), trees, max_size=4))
@example({"a": "2020-99-99", "b": "1e3", "c": "0x1f"})
def test_what_is_checked_is_what_is_used(tree: dict[str, Any]) -> None:
    """OmegaConf reads a recipe's text again: it must see the same keys, and the same texts."""
    from omegaconf import OmegaConf

    with _folder() as folder:
        file = folder / "fuzzed.yaml"
        file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
        try:
            document = read_document(file)
        except ConfigError:
            return
        try:
            other = OmegaConf.to_container(OmegaConf.create(document.text), resolve=False)
        except Exception:  # OmegaConf refuses it, too
            return
    assert _agrees(document.data, other)


def _agrees(checked: Any, used: Any) -> bool:
    """Say whether keys and texts are the same; `1e3` is a text to YAML 1.1, which is checked, and a number later."""
    if isinstance(used, dict):
        if not isinstance(checked, dict) or len(checked) != len(used):
            return False
        same_keys = (str(a) == str(b) or not isinstance(b, str) for a, b in zip(checked, used, strict=True))
        return all(same_keys) and all(map(_agrees, checked.values(), used.values()))
    if isinstance(used, list):
        return isinstance(checked, list) and len(checked) == len(used) and all(map(_agrees, checked, used))
    return used == checked if isinstance(used, str) else not isinstance(checked, dict | list)
