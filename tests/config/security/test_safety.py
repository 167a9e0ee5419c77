"""What a shared recipe may not do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlotool.config import check_recipe_file, compose
from tests.config.conftest import message_of

Write = Callable[..., Path]

REFUSED = {
    "hydra: {callbacks: {x: {_target_: torch.save, f: pwned}}}": "hydra.callbacks",
    "hydra: {sweeper: {_target_: evil.Sweeper}}": "hydra.sweeper._target_",
    "sweep: {storage: 'sqlite:////tmp/x.db'}": "sweep.storage",
    "sweep: {params: {sweep.storage: 'a,b'}}": "sweep.params, 'sweep.storage'",
    "sweep: {params: {data.download: 'true,false'}}": "sweep.params, 'data.download'",
    "? hydra.run.dir\n: x": "hydra.run.dir",
    "hydra: {sweeper: {params: {seed: '${oc.env:HOME}'}}}": "oc.env",
    "name: ../../outside": "../../outside",
    "seed: !!python/object/apply:os.system [ls]": "python/object",
    "a: &a [1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]": "aliases",
    "a: &a [*a]": "levels",
    "name: a\nname: b": "'name' twice, again in line 4",
    "name: [": "line",
    'name: "\\e]0;owned\\a"': "\\x1b]0;owned",
    "- 1": "list",
    "seed: 010": "which YAML reads as a number in base 8",
    "defaults: [{override hydra/job_logging: x}]": "hydra/job_logging",
    "defaults: [{/model@hydra.callbacks.x: mlp}]": "hydra.callbacks.x",
    "defaults: [{/data: ../../x}]": "../../x",
    "defaults: ['${oc.env:HOME}']": "oc.env",
    "defaults: ['file:///etc/x']": "file:",
    "defaults: [{/modle: mlp}]": "Did you mean 'model'?",
    "defaults: [{data: digits}]": "/data",
    "defaults: [{/recipe: mwn}]": "- mwn",
    "data: {root: '${oc.env:HOME}'}": "oc.env",
    "data: {root: '${oc.decode:\"${seed}\"}'}": "oc.decode",
    "data: {root: /etc}": "data.root",
    "objective: '${hydra.runtime.cwd}'": "hydra.runtime.cwd",
    "objective: '${oc.select:seed,${oc.env:HOME}}'": "oc.env",
    "logger: {mode: online}": "logger.mode",
    "logger: {loggers: [{_target_: pytorch_lightning.loggers.WandbLogger}]}": "WandbLogger, which may upload",
    "logger: {loggers: '${analyses.x}'}": "logger.loggers[0]._target_: found '${analyses.x}', which is not trusted",
    "logger: {loggers: [{_target_: pytorch_lightning.loggers.CSVLogger, version: 0}]}": "loggers[0].version: found 0",
    "logger: {loggers: [{_target_: pytorch_lightning.loggers.CSVLogger, save_dir: 'file:~/x'}]}": "found 'file:~/x'",
    "data: {download: true}": "data.download=true",
    "problems: {classifier: {module: {weights: IMAGENET1K_V1}}}": "problems.classifier.module.weights",
    "data: {download: {_target_: torch.nn.Identity}}": "data.download",
    "hydra: {sweeper: {params: {problems.c.module: '{weights: X},{weights: Y}'}}}": "no mappings",
    "analyses: {a: {dirpath: /tmp}}": "dirpath",
    "problems: {classifier: {channels_last: 3}}": "problems.classifier.channels_last: found 3; expected true or false",
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
    write_recipe("defaults: [parts/evil]", name="middle")
    path = write_recipe("defaults: [/recipe/middle, mwn, _self_]")
    for message in (message_of(check_recipe_file, path), message_of(compose, "mine")):
        assert "parts/evil.yaml" in message
        assert "hydra.run" in message


def test_refused_when_it_is_large(write_recipe: Write) -> None:
    for body, limit in (("name: mine\n" + "# x\n" * 100_000, "100000 bytes"), (f"seed: {'9' * 5_000}", "at most 2000")):
        assert limit in message_of(check_recipe_file, write_recipe(body))


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
problems: {classifier: {optimizer: {lr: 0.5, momentum: "${oc.select:evaluate.nothing,0.5}"}}}
data: {download: false}
logger: {project: "team:x", loggers: [{_target_: pytorch_lightning.loggers.CSVLogger, save_dir: logs}]}
"""
    check_recipe_file(write_recipe(body))
