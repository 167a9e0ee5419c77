"""What a run tells of its models: nodes.json, and the number of parameters in summary.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mlotool
from mlotool.config import Built
from mlotool.program import Graph, Problem, Program
from mlotool.runner import records
from mlotool.runner.records import num_parameters, write_nodes
from mlotool.spaces import Space
from mlotool.spaces.decisions import Decision

QUIET = ["runner.accelerator=cpu", "logger.wandb=false", "runner.report=false", "runner.progress_bar=false"]
RECIPE = """# @package _global_
# A space.
defaults: [plain, _self_]
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
          candidates: {relu: null, tanh: {_target_: torch.nn.Tanh}}
"""


def run(folder: Path, recipe: str, *words: str) -> Path:
    config = mlotool.compose(recipe, [*QUIET, "runner.max_ticks=2", *words])
    return mlotool.run(config, output_dir=folder / "run").output_dir


def test_a_space_leaves_its_nodes_and_decisions(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    folder = run(tmp_path, str(tmp_path / "mine.yaml"), "+decisions.activation_1=tanh")
    [(name, record)] = json.loads((folder / "nodes.json").read_text())["problems"].items()
    assert (name, record["num_parameters"], record["num_nodes"]) == ("classifier", 682, 8)
    assert record["nodes"][5] == {
        "id": "layers.4", "kind": "Tanh", "inputs": ["layers.3"], "shape": [8], "mutator": "activation",
    }  # fmt: skip
    assert [each["mutator"] for each in record["nodes"]].count(None) == 7
    assert record["decisions"] == [
        {"name": f"activation_{number}", "value": value, "candidates": ["relu", "tanh"], "num_candidates": 2}
        for number, value in enumerate(("relu", "tanh"))
    ]
    assert json.loads((folder / "summary.json").read_text())["num_parameters"] == {"classifier": 682}


def test_an_ordinary_run_has_counts_and_no_nodes(tmp_path: Path) -> None:
    folder = run(tmp_path, "mwn")
    assert not (folder / "nodes.json").exists()
    counts = json.loads((folder / "summary.json").read_text())["num_parameters"]
    assert counts == {"reweight": 301, "classifier": 26122}


def _problem(module: nn.Module, **settings: Any) -> Problem:
    def loss(batch: Any, model: Any) -> torch.Tensor:
        return model(torch.zeros(1, 2)).sum()

    return Problem(
        "model",
        module,
        loss,
        roles={"model": "model"},
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        **settings,
    )


def test_parameters_are_those_of_one_task() -> None:
    assert num_parameters(Program([_problem(nn.Linear(2, 3), tasks=4)], Graph())) == {"model": 9}
    frozen = nn.Linear(2, 3).requires_grad_(False)
    assert num_parameters(Program([_problem(nn.Sequential(nn.Linear(2, 2), frozen))], Graph())) == {"model": 15}


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(50))), inputs=[2])
    program = Program([_problem(space)], Graph())
    many = tuple(f"c{number}" for number in range(10_000))
    built = Built(program, None, decisions={"model": [Decision("a", many, "c0")]})
    write_nodes(tmp_path, built)
    record = json.loads((tmp_path / "nodes.json").read_text())["problems"]["model"]
    assert (len(record["nodes"]), len(record["decisions"][0]["candidates"])) == (52, records.MAX_CANDIDATES)
    assert record["decisions"][0]["num_candidates"] == 10_000
    monkeypatch.setattr(records, "MAX_NODES", 50)
    write_nodes(tmp_path, built)
    record = json.loads((tmp_path / "nodes.json").read_text())["problems"]["model"]
    assert (record["num_nodes"], record["nodes"]) == (52, [])
