"""What a run tells of its models: nodes.json, numbers of parameters, candidates that were never trained."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import mlotool
from mlotool.core.bound_module import BoundModule
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import FirstOrder
from mlotool.losses import path_cross_entropy
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.records import num_parameters, warn_of_untrained
from mlotool.spaces import Operator, PathWeights, SharedSpace, UniformPaths
from tests.runner.tiny import Blobs

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


def test_a_space_leaves_its_nodes_and_decisions(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    words = [*QUIET, "runner.max_ticks=2", "+decisions.activation_1=tanh"]
    folder = mlotool.run(mlotool.compose(str(tmp_path / "mine.yaml"), words), output_dir=tmp_path / "run").output_dir
    [(name, record)] = json.loads((folder / "nodes.json").read_text())["problems"].items()
    assert (name, record["num_parameters"], record["num_nodes"]) == ("classifier", 682, 8)
    node = {"id": "layers.4", "kind": "Tanh", "inputs": ["layers.3"], "shape": [8], "mutator": "activation"}
    assert record["nodes"][5] == node
    assert [node["mutator"] for node in record["nodes"]].count(None) == 7
    assert record["decisions"] == [
        {"name": f"activation_{number}", "value": value, "candidates": ["relu", "tanh"], "num_candidates": 2}
        for number, value in enumerate(("relu", "tanh"))
    ]
    assert json.loads((folder / "summary.json").read_text())["num_parameters"] == {"classifier": 682}


def _problem(module: nn.Module, **settings: Any) -> Problem:
    def loss(batch: Any, model: Any) -> torch.Tensor:
        return model(torch.zeros(1, 2)).sum()

    return Problem(
        "model", module, loss, roles={"model": "model"}, optimizer=partial(torch.optim.SGD, lr=0.1), **settings
    )


def test_parameters_are_those_of_one_task() -> None:
    assert num_parameters(Program([_problem(nn.Linear(2, 3), tasks=4)], Graph())) == {"model": 9}
    frozen = nn.Linear(2, 3).requires_grad_(False)
    assert num_parameters(Program([_problem(nn.Sequential(nn.Linear(2, 2), frozen))], Graph())) == {"model": 15}


def space(**settings: Any) -> SharedSpace:
    activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
    torch.manual_seed(0)
    base = lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
    return SharedSpace(base, [activation], inputs=[4], **settings)


def cross_entropy(batch: Any, *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input"]), batch["target"])


def told(program: Program, ranks: Ranks | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_untrained(program, ranks or Ranks())
    return [str(warning.message) for warning in found]


class WithOthers(Ranks):
    """Beside ranks that have drawn each candidate once."""

    def total(self, tensor: Tensor) -> Tensor:
        return tensor + 1


SETTINGS = {"stream": Stream(Blobs(40, 0), 8, seed=0), "optimizer": partial(torch.optim.SGD, lr=0.1)}


def test_a_candidate_that_was_never_drawn_is_told_at_the_end() -> None:
    torch.manual_seed(3)
    problem = Problem("net", space(paths=UniformPaths()), cross_entropy, roles={"model": "net"}, **SETTINGS)
    made = Program([problem], Graph())
    schedule = Schedule(made)
    assert told(made) == []
    schedule.tick()
    counts = problem.module.path_counts
    never = [f"{name}: {value}" for name, values in counts.items() for value, count in values.items() if not count]
    [message] = told(made)
    assert len(never) == 2 and ", ".join(never) in message
    assert message.startswith("problems.net.module: found candidates that no training step has computed")
    assert "FairPaths" in message
    assert told(made, WithOthers()) == []
    for _ in range(30):
        schedule.tick()
    assert told(made) == []


def test_where_another_problem_decides_its_rate_is_named() -> None:
    roles = {"model": "net", "paths": "paths"}
    net = Problem("net", space(), path_cross_entropy, roles=roles, hypergradient=FirstOrder(), **SETTINGS)
    paths = Problem("paths", PathWeights(space), path_cross_entropy, roles=roles, **SETTINGS)
    made = Program([net, paths], Graph({"paths": ["net"]}, {"net": ["paths"]}))
    with torch.no_grad():
        net.module.counts[0] += 1
    assert "a lower problems.paths.optimizer.lr" in told(made)[0]


def test_the_entropy_weight_keeps_decisions_open() -> None:
    module = PathWeights(space)
    with torch.no_grad():
        module.logits["activation_0"][1] = 3.0
    batch = {"input": torch.randn(8, 4), "target": torch.randint(3, (8,))}
    roles = {"model": space(), "paths": BoundModule(module, training=True)}
    plain, kept = (path_cross_entropy(batch, **roles, entropy=weight).loss for weight in (0.0, 0.5))
    assert torch.allclose(plain - kept, 0.5 * module.entropy())
