"""The hypergradient at the top of a ladder of diamonds: mlotool's time and Betty's as the paths multiply.

    python -m benchmarks.ladder --betty PATH_TO_A_CLONE_OF_BETTY

    x ~~> p0 --> a1, b1 --> p1 --> a2, b2 --> p2 --> ... --> p_depth --> x      (~~> shapes, --> is read by)

`depth` diamonds in series have 2^depth paths, but only 4 depth + 2 edges. Each problem is a least-squares one of a
few parameters whose Hessian is the identity, so every algorithm's answer is the closed form. Betty walks every
path; mlotool calls each pullback once.
"""

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import record
from mlotool.hypergradient import Identity, Implicit
from mlotool.program import Graph, Problem, Program

SIZE = 4
"""Parameters of a problem."""


class Point(nn.Module):
    """A vector that is its own model."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((SIZE,), start, dtype=torch.float64))

    def forward(self) -> Tensor:
        """Return the vector."""
        return self.value


class Ladder:
    """The problems, what each reads, and the maps between them.

    Args:
        depth: diamonds in series.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.reads: dict[str, tuple[str, ...]] = {"p0": ("x",)}
        for rung in range(1, depth + 1):
            self.reads.update({f"{side}{rung}": (f"p{rung - 1}",) for side in "ab"})
            self.reads[f"p{rung}"] = (f"a{rung}", f"b{rung}")
        generator = torch.Generator().manual_seed(0)
        self.maps = {
            (reader, read): torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
            for reader, names in self.reads.items()
            for read in names
        }
        self.top = f"p{depth}"
        self.modules = {name: Point(0.1 * number) for number, name in enumerate(("x", *self.reads))}

    @property
    def upward(self) -> dict[str, list[str]]:
        """Who reads whom, by the problem that is read."""
        edges: dict[str, list[str]] = {self.top: ["x"]}
        for reader, names in self.reads.items():
            for read in names:
                if read != "x":
                    edges.setdefault(read, []).append(reader)
        return edges

    def lower_loss(self, name: str, value: Tensor, read: Mapping[str, Tensor]) -> Tensor:
        """Return `0.5 |theta - sum_j A_j theta_j|^2`."""
        target = sum(self.maps[name, other] @ read[other] for other in self.reads[name])
        return 0.5 * (value - target).square().sum()

    def upper_loss(self, value: Tensor) -> Tensor:
        """Return `0.5 |theta_top - 1|^2`."""
        return 0.5 * (value - 1.0).square().sum()

    def closed_form(self) -> Tensor:
        """Return the hypergradient: `dtheta_l = A dtheta_j` along every edge."""
        jacobian = {"x": torch.eye(SIZE, dtype=torch.float64)}
        for name, names in self.reads.items():
            jacobian[name] = sum(self.maps[name, other] @ jacobian[other] for other in names)
        return jacobian[self.top].T @ (self.modules[self.top].value.detach() - 1.0)


def in_mlotool(ladder: Ladder, product: str) -> Callable[[], Tensor]:
    """Return a function that computes the hypergradient in mlotool."""

    def lower(name: str) -> Problem:
        def loss(batch: None, **roles: Any) -> Tensor:
            values = {role.removeprefix("role_"): player() for role, player in roles.items()}
            return ladder.lower_loss(name, values[name], values)

        roles = {f"role_{each}": each for each in (name, *ladder.reads[name])}
        return Problem(name, ladder.modules[name], loss, roles=roles, hypergradient=Implicit(Identity(), product))

    def upper_loss(batch: None, *, top: Any) -> Tensor:
        return ladder.upper_loss(top())

    upper = Problem("x", ladder.modules["x"], upper_loss, roles={"top": ladder.top})
    graph = Graph(upper_to_lower={"x": ["p0"]}, lower_to_upper=ladder.upward)
    program = Program([upper, *(lower(name) for name in ladder.reads)], graph)
    return lambda: program.gradient("x")["value"]


def in_betty(ladder: Ladder) -> Callable[[], Tensor]:
    """Return a function that computes the hypergradient in Betty, by its `darts`."""
    problem_class: Any = importlib.import_module("betty.problems").ImplicitProblem
    configs = importlib.import_module("betty.configs")
    engine_class = importlib.import_module("betty.engine").Engine
    logging.getLogger("betty").disabled = True
    found: list[Tensor] = []

    class Lower(problem_class):
        """A lower problem."""

        def training_step(self, batch: None) -> Tensor:
            read = {other: getattr(self, other)() for other in ladder.reads[self.name]}
            return ladder.lower_loss(self.name, self(), read)

        def get_batch(self) -> None:
            """Return nothing: there is no data."""

    class Upper(problem_class):
        """The problem at the top."""

        def training_step(self, batch: None) -> Tensor:
            return ladder.upper_loss(getattr(self, ladder.top)())

        def get_batch(self) -> None:
            """Return nothing: there is no data."""

        def grad_callback(self) -> None:
            """Keep the gradient, which Betty deletes after the step."""
            found[:] = [parameter.grad.clone() for parameter in self.trainable_parameters()]

    problems = {
        name: (Upper if name == "x" else Lower)(
            name=name, config=configs.Config(), module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0)
        )
        for name, module in ladder.modules.items()
    }
    upward = {problems[read]: [problems[each] for each in readers] for read, readers in ladder.upward.items()}
    engine_class(
        problems=list(problems.values()),
        config=configs.EngineConfig(strategy="cpu"),
        dependencies={"u2l": {problems["x"]: [problems["p0"]]}, "l2u": upward},
    )

    def gradient() -> Tensor:
        problems["x"].one_step_descent()
        return found[0]

    return gradient


def measure(depth: int, gradient_of: Callable[[Ladder], Callable[[], Tensor]], num_repeats: int) -> dict[str, float]:
    """Return the shortest seconds of one hypergradient, and its relative error."""
    ladder = Ladder(depth)
    exact = ladder.closed_form()
    gradient = gradient_of(ladder)
    wall, cpu = [], []
    for _ in range(num_repeats):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        found = gradient()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return {"seconds": min(wall), "cpu_seconds": min(cpu), "error": float((found - exact).norm() / exact.norm())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 6, 8, 10], help="diamonds in series")
    parser.add_argument("--betty", type=Path, help="folder of a clone of Betty; without it only mlotool is timed")
    parser.add_argument("--betty-depth", type=int, default=10, help="largest ladder that Betty is timed on")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/ladder.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings()  # before the run: the checkout may move on meanwhile
    if arguments.betty is not None:
        sys.path.insert(0, str(arguments.betty))
    print("| paths | problems | edges | rival | seconds | relative error |")
    print("|---|---|---|---|---|---|")
    rows = []
    for depth in arguments.depths:
        rivals = {
            "mlotool, finite_difference": (lambda ladder: in_mlotool(ladder, "finite_difference"), 5),
            "mlotool, reverse": (lambda ladder: in_mlotool(ladder, "reverse"), 5),
        }
        if arguments.betty is not None and depth <= arguments.betty_depth:
            rivals["betty, darts"] = (in_betty, 1 if depth > 4 else 3)
        for name, (gradient_of, num_repeats) in rivals.items():
            row = {"depth": depth, "num_paths": 2**depth, "num_problems": 3 * depth + 2, "num_edges": 4 * depth + 2}
            row |= {"rival": name, **measure(depth, gradient_of, num_repeats)}
            rows.append(row)
            print(
                f"| {row['num_paths']} | {row['num_problems']} | {row['num_edges']} | {name} | {row['seconds']:.4f} "
                f"| {row['error']:.1e} |",
                flush=True,
            )
    content = {**where, "rows": rows}
    print(f"\nwritten to {record.write('ladder', content, arguments.output)}")


if __name__ == "__main__":
    main()
