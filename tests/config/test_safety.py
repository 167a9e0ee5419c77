"""What a shared recipe may not do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlotool.config import check_recipe_file, compose, package_dir
from tests.config.conftest import message_of

Write = Callable[..., Path]

REFUSED = {
    "hydra: {callbacks: {x: {_target_: torch.save, f: pwned}}}": "hydra.callbacks",
    "hydra: {job_logging: {formatters: {x: {(): os.system}}}}": "hydra.job_logging",
    "hydra: {run: {dir: /tmp/elsewhere}}": "hydra.run",
    "hydra: {sweeper: {_target_: evil.Sweeper}}": "hydra.sweeper._target_",
    "sweep: {launcher_options: {slurm_setup: [touch /tmp/x]}}": "sweep.launcher_options",
    "sweep: {storage: 'sqlite:////tmp/x.db'}": "sweep.storage",
    "sweep: ${data}": "sweep: found",
    "sweep: {params: {sweep.storage: 'a,b'}}": "sweep.params, 'sweep.storage'",
    "sweep: {params: {hydra.sweep.dir: '/tmp/x,/tmp/y'}}": "sweep.params, 'hydra.sweep.dir'",
    "sweep: {params: {data.download: 'true,false'}}": "sweep.params, 'data.download'",
    "hydra: [1]": "hydra",
    "? hydra.run.dir\n: x": "hydra.run.dir",
    "hydra: {sweeper: {params: {hydra.run.dir: x}}}": "hydra.run.dir",
    "hydra: {sweeper: {params: {+hydra/callbacks@hydra.callbacks: x}}}": "hydra/callbacks",
    "hydra: {sweeper: {params: {model@hydra.callbacks.x: mlp}}}": "hydra.callbacks.x",
    "hydra: {sweeper: {params: {name: '../../a,b'}}}": "name",
    "hydra: {sweeper: {params: {data.download: 'true'}}}": "data.download",
    "hydra: {sweeper: {params: {seed: '${oc.env:HOME}'}}}": "oc.env",
    "a: &a {hydra: {run: {dir: x}}}\n<<: *a": "hydra.run",
    "name: ../../outside": "../../outside",
    "name: ${seed}": "name",
    "seed: !!python/object/apply:os.system [ls]": "python/object",
    "seed: !!binary aGk=": "binary",
    "name: !mine x": "!mine",
    "a: &a [1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]": "aliases",
    "a: &a [*a]": "alias",
    "name: a\nname: b": "'name' twice, again in line 4",
    "name: [": "line",
    "- 1": "list",
    "defaults: [{override hydra/job_logging: x}]": "hydra/job_logging",
    "defaults: [{/hydra/callbacks: x}]": "hydra/callbacks",
    "defaults: [{/model@hydra.callbacks.x: mlp}]": "hydra.callbacks.x",
    "defaults: [{/model@_global_: mlp}]": "_global_",
    "defaults: [mwn@hydra]": "hydra",
    "defaults: [_self_@hydra]": "hydra",
    "defaults: [{/data: /etc/passwd}]": "/etc/passwd",
    "defaults: [{/data: ../../x}]": "../../x",
    "defaults: [//etc/passwd]": "//etc/passwd",
    "defaults: ['file:///etc/x']": "file:",
    "defaults: ['${oc.env:HOME}']": "oc.env",
    "defaults: [{/modle: mlp}]": "Did you mean 'model'?",
    "defaults: [{data: digits}]": "/data",
    "defaults: [{/recipe: mwn}]": "- mwn",
    "defaults: mwn": "list",
    "defaults: [[mwn]]": "defaults",
    "data: {root: '${oc.env:HOME}'}": "oc.env",
    "data: {root: '${${x}:HOME}'}": "${x}",
    "data: {root: '${oc.decode:\"${seed}\"}'}": "oc.decode",
    "data: {download: true}": "data.download=true",
    "problems: {classifier: {module: {weights: IMAGENET1K_V1}}}": "problems.classifier.module.weights",
    "problems: {classifier: {module: {x: [{loader: torch.load}]}}}": "loader",
    "problems: {classifier: {module: {weights: [X]}}}": "problems.classifier.module.weights[0]",
    "problems: {classifier: {module: {x: {loader: {a: b}}}}}": "loader.a",
    "data: {download: {_target_: torch.nn.Identity}}": "data.download",
    "hydra: {sweeper: {params: {problems.c.module: '{weights: X},{weights: Y}'}}}": "no mappings",
    "analyses: {a: {dirpath: /tmp}}": "dirpath",
    "problems: {classifier: {channels_last: 3}}": "problems.classifier.channels_last: found 3; expected true or false",
    "runner: {report: 0.0}": "runner.report: found 0.0; expected true or false",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refused_before_hydra_reads_it(body: str, write_recipe: Write) -> None:
    path = write_recipe(body)
    for message in (message_of(check_recipe_file, path), message_of(compose, "mine"), message_of(compose, str(path))):
        assert REFUSED[body] in message
        assert str(path) in message


@pytest.mark.parametrize(
    "header", ["", "# Mine.\n", "# @package hydra\n", "# @package _group_\n", "# @package _global_\n# @package hydra\n"]
)
def test_the_header_is_needed(header: str, write_recipe: Write) -> None:
    path = write_recipe("name: mine\n", header=header)
    message = message_of(check_recipe_file, path)
    assert "# @package _global_" in message
    assert message == message_of(compose, "mine")


def test_refused_in_what_the_defaults_reach(write_recipe: Write) -> None:
    write_recipe("hydra: {run: {dir: x}}", name="parts/evil")
    middle = write_recipe("defaults: [parts/evil]", name="middle")
    path = write_recipe("defaults: [/recipe/middle, mwn, _self_]")
    for message in (message_of(check_recipe_file, path), message_of(compose, "mine")):
        assert "parts/evil.yaml" in message
        assert "hydra.run" in message
    assert middle.is_file()


def test_refused_when_it_is_large(write_recipe: Write) -> None:
    assert "at most" in message_of(check_recipe_file, write_recipe("name: mine\n" + "# x\n" * 100_000))


def test_a_file_that_is_not_text(write_recipe: Write, folder: Path) -> None:
    path = write_recipe("")
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in message_of(check_recipe_file, path)
    assert "cannot be read" in message_of(check_recipe_file, folder / "nowhere.yaml")


def test_names_of_problems_and_analyses_are_free(write_recipe: Write) -> None:
    roles = "roles: {weights: {problem: weights, mode: eval}}"
    loss = f"{{_target_: mlotool.losses.cross_entropy, {roles}}}"
    body = f"problems: {{weights: {{loss: {loss}}}}}\nanalyses: {{weights: {{{roles}}}}}\n"
    check_recipe_file(write_recipe(body + "graph: {upper_to_lower: {weights: [classifier]}}\n"))


def test_accepted(write_recipe: Write) -> None:
    body = """
defaults:
  - mwn
  - /optimizer@problems.reweight.optimizer: adam
  - _self_
  - override /data: digits_longtailed
  - override /debug: off
hydra: {sweeper: {params: {seed: "0,1", model@problems.classifier.module: "mlp,linear", +recipe: "a,b"}}}
x_: &lr 0.5
problems: {classifier: {optimizer: {lr: *lr, momentum: "${oc.select:evaluate.nothing,0.5}"}}}
data: {download: false}
""".replace("x_: &lr 0.5\n", "").replace("*lr", "0.5")
    check_recipe_file(write_recipe(body))


@pytest.mark.parametrize("path", sorted(package_dir("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_built_in_recipes_pass(path: Path) -> None:
    check_recipe_file(path)
