"""Anything may stand in a recipe, and on a command line: the loader answers with a config or a ConfigError, soon."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlotool.config import check, check_recipe_file, compose, package_dir, register_sources
from mlotool.core.errors import ConfigError

HEADER = "# @package _global_\n"
SECONDS = 20
"""For one example; most take a hundredth of it, but other processes may share the machine."""

# What gives a mutation a chance to matter: keys and values that mean something here, to Hydra or to OmegaConf.
WORDS = (
    *("_target_", "_args_", "_partial_", "_convert_", "defaults", "hydra", "problems", "data", "loss", "roles", "name"),
    *("graph", "evaluate", "splits", "stream", "logger", "mode", "online", "runner", "seed", "analyses", "groups"),
    *("os.system", "torch.load", "torch.nn.Linear", "mlotool.models.MLP", "override /data", "/model@data", "mwn"),
    *("${seed}", "${data}", "${.x}", "${..x}", "${oc.env:HOME}", "${", "$", "}", "\\${seed}", "../x", "/etc", "~", ""),
    *("???", "<<", "*a", "&a", "!!x", "\x00", "\x1b[2J", "\u202e", "é", "_self_", "null", "1e3", "0x", "-", ".", "a.b"),
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


def _loads(text: str | bytes) -> None:
    """Load a recipe's text; anything but a ConfigError or a checked config is an error of the test."""
    with _folder() as folder:
        file = folder / "fuzzed.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        with suppress(ConfigError):
            check_recipe_file(file)
            check(compose(str(file)))
        left = {path.name for path in folder.rglob("*")}
    assert left == {"fuzzed.yaml"}


def _mutated(text: str, changes: list[tuple[int, int, str]]) -> str:
    for start, length, inserted in changes:
        place = start % (len(text) + 1)
        text = text[:place] + inserted + text[place + length :]
    return text


def _command_line(words: list[str]) -> None:
    with _folder(), suppress(ConfigError):
        check(compose("plain", words))


names = st.sampled_from(sorted(RECIPES))
mutations = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 30), texts), min_size=1, max_size=4)
some_bytes = st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
KINDS: dict[str, tuple[Callable[..., Any], Any, int]] = {
    "trees": (lambda tree: _loads(HEADER + yaml.safe_dump(tree, allow_unicode=True)), [trees], 6),
    "bytes": (lambda content: _loads(HEADER.encode() + content), [some_bytes], 25),
    "mutated recipes": (lambda name, changes: _loads(_mutated(RECIPES[name], changes)), [names, mutations], 10),
    "command lines": (_command_line, [st.lists(overrides, min_size=1, max_size=3)], 10),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_no_traceback(kind: str) -> None:
    check_one, strategies, num_examples = KINDS[kind]
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    few = settings(
        max_examples=num_examples, deadline=SECONDS * 1000, derandomize=True, database=None, suppress_health_check=quiet
    )

    def check_drawn(drawn: Any) -> None:
        check_one(*drawn)

    few(given(st.tuples(*strategies))(check_drawn))()
