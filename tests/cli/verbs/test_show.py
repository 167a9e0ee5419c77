"""`mlotool show`: what a recipe sets, what layer-parallel training promises, the nodes and decisions of a model."""

import re
from pathlib import Path

import pytest
import yaml

import mlotool
from mlotool.config import list_recipes
from mlotool.config.composition import plain
from tests.cli.conftest import Call, Recipe

BUILT_IN = Path(mlotool.__file__).parents[1] / "recipes"
QUICK = ("learned_lr", "label_correction_paper", "domain_adaptation")
RECIPES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in (recipe.name for recipe in list_recipes() if recipe.path.parent == BUILT_IN)
]


@pytest.mark.parametrize("name", RECIPES)
def test_only_defaults_are_left_out(call: Call, tmp_path: Path, name: str) -> None:
    """What is shown makes the same config, were it a recipe."""
    code, out, _ = call("show", name)
    assert code == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(f"# @package _global_\n{out}")
    assert plain(mlotool.compose(str(shown))) == plain(mlotool.compose(name))


def test_shows_what_is_set_and_no_more(call: Call) -> None:
    words = ["mwn", "seed=3", "runner.log_every=7", "hypergradient=cg", "problems.classifier.optimizer.lr=0.5"]
    _, out, _ = call("show", *words)
    shown = yaml.safe_load(out)
    assert shown["seed"] == shown["data"]["seed"] == 3
    assert shown["runner"] == {"max_ticks": 2000, "log_every": 7}
    assert shown["hypergradient"]["solver"]["_target_"].endswith(".ConjugateGradient")
    assert shown["problems"]["classifier"]["optimizer"]["lr"] == 0.5
    assert shown["problems"]["classifier"]["stream"] == {"split": "train", "batch_size": 100}
    assert not {"logger", "debug", "sweep", "resume"} & set(shown)
    assert "options: data=digits_noisy, hypergradient=cg," in out
    assert f"mlotool show {' '.join(words)} --all" in out.splitlines()[0] and len(out.splitlines()) < 70
    assert "reweight -->|shapes| classifier" in out
    assert yaml.safe_load(call("show", "mwn", "--all")[1]) == plain(mlotool.compose("mwn"))


def test_what_is_inherited_is_shown_and_named(call: Call, recipe: Recipe) -> None:
    _, out, _ = call("show", str(recipe("seed: 3\nlogger: {project: mine}\n")))
    shown = yaml.safe_load(out)
    assert "# inherits: plain" in out
    assert (shown["name"], shown["seed"], shown["logger"]) == ("plain", 3, {"project": "mine"})
    assert "classifier" in shown["problems"]
    # Without solutions there are no hypergradients.
    assert "hypergradient" not in shown


def test_another_target_keeps_keys_until_they_are_deleted(call: Call) -> None:
    place = "problems.classifier.optimizer"
    deleted = [f"~{place}.{key}" for key in ("momentum", "weight_decay", "nesterov")]
    _, out, _ = call("show", "plain", *deleted, f"{place}={{_target_: torch.optim.Adam, lr: 0.1}}")
    assert yaml.safe_load(out)["problems"]["classifier"]["optimizer"] == {"_target_": "torch.optim.Adam", "lr": 0.1}


def test_stages(call: Call) -> None:
    code, out, err = call("show", "layerparallel_resnet", "--parallel", "debug.limit_samples=120")
    assert code == 0, err
    balance, speed = out.splitlines()
    assert re.fullmatch(
        r"classifier: 3 stages begin at the input and at stages\.\d\.\d, stages\.\d\.\d; they take \S+, \S+ and "
        r"\S+ ms, the longest \d\.\d\d times the mean\.",
        balance,
    )
    assert re.search(r"at most \d\.\d\d times as fast as in one process, and \d\.\d\d times", speed)


def test_multigrid_by_its_critical_path(call: Call) -> None:
    """By hand: 8 chunks, one worker each, FCF, two cycles over grids of 32, 8 and 2 layers."""
    code, out, _ = call("show", "multigrid_peaks", "--parallel", "debug.limit_samples=300")
    assert code == 0
    assert "classifier: the part 'layers' has 32 layers. A serial step evaluates 64 layers one after the other" in out
    assert "456 one after the other with one worker, and 100 with 8. With 8 it is at most 0.64 times as fast" in out


def test_where_it_is_and_what_to_add_for_it_is_told(call: Call) -> None:
    expected = "# the speed-up to expect of layer-parallel training: mlotool show layerparallel_resnet --parallel"
    assert expected in call("show", "layerparallel_resnet")[1]
    code, _, err = call("show", "plain", "--parallel")
    assert code == 2 and "found no problem with a parallel setting" in err
    assert "+parallel@problems.classifier.parallel=penalty" in err


pytestmark = pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")

WIDTH = 100

SPACE = """
problems:
  classifier:
    module:
      _target_: mlotool.spaces.Space
      base: {_target_: mlotool.models.MLP, image_shape: [1, 8, 8], hidden: [8, 8], num_classes: 10}
      inputs: [1, 8, 8]
      mutators:
        - _target_: mlotool.spaces.Operator
          name: activation
          at: {type: ReLU}
          candidates:
            relu: null
            tanh: {_target_: torch.nn.Tanh}
            narrow: {_target_: torch.nn.Linear, out_features: 3}
"""
CODE = """
import torch
from mlotool.spaces import choose

class Chosen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = torch.nn.Flatten()
        widths = [64, *(choose(f"width_{i}", [16, 32]) for i in range(choose("depth", [1, 2])))]
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])))
        self.last = torch.nn.Linear(widths[-1], 10)

    def forward(self, images):
        return self.last(self.layers(self.flat(images)))

class Needy(Chosen):
    def forward(self, images):
        return super().forward(images[images[:, 0, 0, 0] > -1e9])

class Untraceable(Chosen):
    def forward(self, images):
        return super().forward(images) if images.sum() > 0 else self.last(images)
"""


@pytest.fixture
def space(recipe: Recipe) -> str:
    return str(recipe(SPACE))


@pytest.fixture
def package(tmp_path: Path) -> str:
    name = f"shown_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


def test_nodes_decisions_and_size(call: Call, space: str) -> None:
    code, out, err = call("show", space, "--nodes", "classifier", "decisions.activation_1=tanh")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "problems.classifier.module: Space of MLP, 8 nodes, 682 parameters"
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[1] for row in rows[:3]] == ["images", "layers.0", "layers.1"]
    assert ["5", "layers.4", "Tanh", "8", "4", "activation"] in rows
    assert ["3", "layers.2", "ReLU", "8", "2"] in rows
    decided = ["activation_0 relu relu, tanh, narrow", "activation_1 tanh relu, tanh, narrow"]
    assert [" ".join(line.split()) for line in lines if line.startswith("activation_")] == decided
    assert f"mlotool run {space} decisions.activation_1=tanh decisions.activation_0=narrow" in out
    # Where a layer is narrow, the next one does not take it.
    assert "size: 4 models: each was built once, without values; " in out
    table = out.partition("decisions; by hand")[0]
    assert all(len(line) <= WIDTH for line in table.splitlines()[2:])


DELETED = [f"~problems.classifier.module.{key}" for key in ("image_shape", "num_classes", "hidden")]


def test_a_module_that_chooses(call: Call, package: str) -> None:
    module = f"problems.classifier.module={{_target_: {package}.Chosen}}"
    code, out, _ = call(
        "show", "plain", "--nodes", "classifier", "--trust", package, *DELETED, module, "decisions.depth=2"
    )
    assert code == 0 and "layers.1" in out
    assert any(line.split() == ["width_0", "..", "width_1", "(2)", "16", "16,", "32"] for line in out.splitlines())
    assert "size: 6 models" in out
    assert f"--trust {package} decisions.width_0=" in out, "what is typed by hand has to be trusted too"


def test_models_that_need_values_are_counted(call: Call, recipe: Recipe, package: str) -> None:
    lines = SPACE.replace("Operator", "Insert").replace("{type: ReLU}", "base")
    base = f"      base: {{_target_: {package}.Needy}}\n      leaves: ['.']"
    file = recipe(re.sub(r"      base: \{.*\}", base, lines))
    code, out, err = call("show", str(file), "--nodes", "classifier", "--trust", package)
    assert (code, err) == (0, "")
    assert "size: 12 models: each was built once" in out


def test_what_cannot_be_followed_is_told_with_its_leaf(call: Call, package: str) -> None:
    module = f"problems.classifier.module={{_target_: {package}.Untraceable}}"
    code, out, err = call("show", "plain", "--nodes", "classifier", "--trust", package, *DELETED, module)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "problems.classifier.module: leaves: the forward of the model itself (Untraceable)" in err
    assert "images.sum() > 0" in err


def test_errors_are_one_line(call: Call, space: str) -> None:
    for words, text in (
        (["clasifier"], "found 'clasifier'; expected a problem of the recipe, one of classifier."),
        (["classifier", "decisions.activation_0=tan"], "expected one of relu, tanh, narrow."),
        (["classifier", "decisions.activation_0=narrow"], "does not accept its input"),
    ):
        code, out, err = call("show", space, "--nodes", *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1) and text in err
