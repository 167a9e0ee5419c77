"""The tasks in Betty, written as its own examples are; Betty is imported from a clone on sys.path."""

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from benchmarks.hypergradients.algorithms import RADIUS, Algorithm, NotOfferedError
from benchmarks.hypergradients.tasks import Bilevel


class Betty:
    """Betty's engine on a task.

    Args:
        task: the task.
        algorithm: by which hypergradients are computed.

    Raises:
        NotOfferedError: Betty has no such algorithm.
    """

    def __init__(self, task: Bilevel, algorithm: Algorithm) -> None:
        self._task, self._scale = task, _scale(algorithm.kind, task)
        self._engine, self._lower, self._upper = make_engine(task, algorithm.kind)

    def hypergradient(self) -> list[Tensor]:
        """Return the upper problem's gradient: what `one_step_descent` does, without the optimizer's step."""
        upper, task = self._upper, self._task
        self._lower.cur_batch, upper.cur_batch = task.lower_batches[0], task.upper_batches[0]
        loss, _ = upper.get_loss(upper.cur_batch)
        upper.backward(
            loss=loss,
            params=upper.trainable_parameters(),
            paths=upper.paths,
            create_graph=False,
            retain_graph=True,
            allow_unused=True,
        )
        found = [each.grad for each in upper.trainable_parameters()]
        upper.zero_grad()
        return found if self._scale == 1.0 else [each * self._scale for each in found]

    def cycle(self) -> None:
        """Take what `Engine.run` does in an iteration without a validation."""
        self._engine.global_step += 1
        self._engine.train_step()


def make_engine(
    task: Bilevel,
    kind: str,
    *,
    num_steps: int = 1,
    upper_optimizer: Any = None,
    momentum: float = 0.0,
    hooks: dict[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Return Betty's engine, its lower and its upper problem.

    Args:
        task: the task.
        kind: of the algorithm.
        num_steps: Betty's unroll_steps.
        upper_optimizer: from parameters; None is Adam.
        momentum: of the lower problem's SGD.
        hooks: methods for the problem classes: `on_inner_loop_start`, `param_callback`.
    """
    problems: Any = importlib.import_module("betty.problems")
    configs = importlib.import_module("betty.configs")
    engines = importlib.import_module("betty.engine")
    logging.getLogger("betty").disabled = True
    settings = _settings(kind, task)
    hooks = hooks or {}
    base = problems.IterativeProblem if kind.startswith("unrolled") else problems.ImplicitProblem

    class Lower(base):
        """The lower problem."""

        def training_step(self, batch: Any) -> Tensor:
            parameters = self.module.parameters() if self.module is not None else self.parameters()
            return task.lower_loss(self, parameters, self.upper, batch, Tensor.detach)

    class Upper(problems.ImplicitProblem):
        """The upper problem."""

        def training_step(self, batch: Any) -> Tensor:
            return task.upper_loss(self.lower, batch)

    for name, hook in hooks.items():
        setattr(Lower if name.startswith("on_") else Upper, name, hook)
    lower_module, upper_module = task.make_lower(), task.make_upper()
    make_upper_optimizer = upper_optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    lower = Lower(
        name="lower",
        config=configs.Config(unroll_steps=num_steps, **settings),
        module=lower_module,
        optimizer=torch.optim.SGD(lower_module.parameters(), lr=task.learning_rate, momentum=momentum),
        train_data_loader=task.lower_batches,
    )
    upper = Upper(
        name="upper",
        config=configs.Config(retain_graph=True),
        module=upper_module,
        optimizer=make_upper_optimizer(upper_module.parameters()),
        train_data_loader=task.upper_batches,
    )
    engine = engines.Engine(
        problems=[upper, lower],
        config=configs.EngineConfig(strategy="cpu"),
        dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )
    engine.train()
    return engine, lower, upper


def _settings(kind: str, task: Bilevel) -> dict[str, Any]:
    rate, count = task.learning_rate, task.num_products
    found = {
        # A series of one term.
        "identity": {"type": "neumann", "neumann_iterations": 0, "neumann_alpha": rate},
        "finite_difference": {"type": "darts", "darts_alpha": RADIUS},
        "sama": {"type": "sama", "sama_adam_alpha": RADIUS},
        "neumann": {"type": "neumann", "neumann_iterations": count, "neumann_alpha": rate},
        "fixed_point": {"type": "neumann", "neumann_iterations": count, "neumann_alpha": rate},
        "cg": {"type": "cg", "cg_iterations": count, "cg_alpha": 1.0},
        "unrolled": {},
        "unrolled_kept": {},
    }.get(kind)
    if found is None:
        raise NotOfferedError("not offered")
    return found


def _scale(kind: str, task: Bilevel) -> float:
    # Its SAMA leaves SGD's learning rate out.
    return task.learning_rate if kind == "sama" else 1.0
