"""The reference has each key, each option and each public name exactly once."""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import mlotool
from docs.generated import api, errors, gallery, hypergradients, keys, options
from mlotool.config import check
from mlotool.config.composition import with_values
from mlotool.config.schema import OPTION_GROUPS, Config, keys_at
from tests.docs.pages import composed

KEYS = [each.path for each in keys.schema_keys()]


def schema_paths(prefix: str = "") -> list[str]:
    """Return every path of the schema, by the schema's own functions."""
    found = []
    for name in keys_at(prefix.replace(keys.NAME, "a")):
        path = f"{prefix}.{name}".lstrip(".")
        found.append(path)
        deeper = f"{path}.{keys.NAME}" if path == "problems" else path
        if keys_at(deeper.replace(keys.NAME, "a")):
            found += schema_paths(deeper)
    return found


def test_each_key_stands_once() -> None:
    found = re.findall(r"^### `([^`]+)`", keys.page(), re.MULTILINE)
    assert sorted(found) == sorted(schema_paths()) and max(Counter(found).values()) == 1
    assert set(KEYS) == set(keys.EXAMPLES)
    assert {"seed", "problems.<name>.stream.repeat", "sweep.pruner"} <= set(found)
    assert Config().name == "unnamed"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the finished run that the example of `decisions_from` names."""
    place = tmp_path_factory.mktemp("keys")
    [word] = keys.overrides(keys.EXAMPLES["decisions_from"]["example"])
    run = place / word.partition("=")[2]
    run.mkdir(parents=True)
    found = mlotool.compose(keys.EXAMPLES["decisions_from"]["recipe"], ["decisions.depth_0=2"])
    OmegaConf.save(found, run / "config.yaml", resolve=True)
    (run / "summary.json").write_text('{"status": "finished"}')
    return place


@pytest.mark.parametrize("path", KEYS)
def test_its_example_is_valid_and_sets_it_to_another_value(
    path: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    recipe, words = keys.EXAMPLES[path].get("recipe", "mwn"), keys.overrides(keys.EXAMPLES[path]["example"])
    # Composing takes Hydra longer than all else here, and does nothing more with a value.
    config = with_values(composed(recipe), words) or mlotool.compose(recipe, words)
    own = {path.replace(keys.NAME, str(name)) for name in composed(recipe).problems}
    # The keys that overrides set, remove or choose options for.
    said = [f"{word.lstrip('+~').split('=')[0].rpartition('@')[2]}." for word in words]
    named = {key for key in own if any(word.startswith(f"{key}.") for word in said)}
    assert len(named) == 1, f"{words} names {len(named)} of {sorted(own)}"
    [key] = named
    before, after = (OmegaConf.select(found, key) for found in (composed(recipe), config))
    assert after != before
    check(config)


def test_each_option_stands_once() -> None:
    found = re.findall(r"^### `([^`]+)`", options.page(), re.MULTILINE)
    assert set(options.HEADINGS) == set(OPTION_GROUPS)
    assert sorted(found) == sorted(
        f"{group}={file.stem}" for group in OPTION_GROUPS for file in (options.CONF / group).glob("*.yaml")
    )


def test_each_public_name_stands_once() -> None:
    pages = dict(api.pages())
    named = re.findall(r"^::: (\S+)$", "\n".join(pages.values()), re.MULTILINE)
    assert max(Counter(named).values()) == 1
    documented = [getattr(import_module(home), name) for home, name in (each.rsplit(".", 1) for each in named)]
    assert max(Counter(id(each) for each in documented if callable(each)).values()) == 1
    for package in api.packages():
        page = pages.get(f"reference/api/{package.replace('.', '_')}.md", "")
        for name in import_module(package).__all__:
            value = getattr(import_module(package), name)
            assert f"::: {package}.{name}\n" in page or any(value is each for each in documented), f"{package}.{name}"


def test_the_table_of_hypergradients_is_the_measured_one() -> None:
    found = hypergradients.PAGE.read_text(encoding="utf-8")
    assert found == hypergradients.page(), "run: python -m docs.generated.hypergradients"
    files = {path.stem for path in (options.CONF / "hypergradient").glob("*.yaml")}
    named = set(re.findall(r"`(\w+)[ `]", hypergradients.table()))
    assert named - {"stop_gradient", "hypergradient"} <= files


def test_each_recipe_has_a_page_and_a_place_in_the_index() -> None:
    index = gallery.index()
    for recipe in gallery.RECIPES:
        assert index.count(f"**[{recipe.stem}]({recipe.stem}.md)**") == 1
    text = gallery.page(gallery.ROOT / "recipes" / "mwn.yaml")
    parts = ("mlotool run +recipe=mwn", "arxiv.org/abs/1902.07379", "<svg", "**Result.** test accuracy", "name: mwn")
    assert [part for part in parts if part not in text] == []


def test_what_is_kept_of_runs_is_whole() -> None:
    kept = sorted(gallery.RUNS.glob("*/run.json"))
    assert len(kept) >= 20
    for path in kept:
        run = gallery.committed(path.parent.name)
        assert run is not None
        assert run["metrics"] and run["figures"] and all((path.parent / figure).is_file() for figure in run["figures"])
        assert run["command"].startswith(f"mlotool run +recipe={path.parent.name}")
        assert not [file for file in path.parent.iterdir() if file.stat().st_size > 100_000]
    for path in sorted(gallery.RUNS.glob("*/search/run.json")):
        name = path.parent.parent.name
        search = gallery.committed(f"{name}/search")
        assert search is not None and search["command"].startswith(f"mlotool run -m +recipe={name}")
        assert search["figures"] and all((path.parent / figure).is_file() for figure in search["figures"])


def test_the_page_of_errors_has_those_of_all_parts() -> None:
    found = errors.messages()
    assert len(found) > 300 and {part for part, _, _ in found} <= set(errors.PARTS)
    page = errors.page()
    assert page.count("\n- `") == len(found) and "found a grid of … jobs (…); expected at most …" in page


def test_the_page_of_errors_has_the_usual_ones() -> None:
    patterns = [re.escape(text).replace(re.escape(errors.ANYTHING), ".*") for _, _, text in errors.messages()]
    words = ("runner.max_tick=3", "runner.max_ticks=many", "problems.classifier.optimizer.lr=-1",
             "problems.classifier.module._target_=mypackage.Net", "graph.upper_to_lower.reweight=[clasifier]",
             "problems.classifier.stream.split=trian", "evaluate.metrics=[acuracy]",
             "problems.classifier.precision=fp61")  # fmt: skip
    for recipe, *overrides in (("mnw",), *(("mwn", word) for word in words)):
        with pytest.raises(mlotool.MlotoolError) as caught:
            check(with_values(composed(recipe), overrides) or mlotool.compose(recipe, overrides))
        for line in str(caught.value).splitlines():
            assert any(re.fullmatch(pattern, line, re.DOTALL) for pattern in patterns), line
