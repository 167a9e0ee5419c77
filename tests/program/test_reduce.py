"""The mean over ranks: where it is called, and that two ranks equal one process with both batches."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import ConjugateGradient, Exact, Identity, Implicit, Neumann
from mlotool.problem.interface import Vector
from mlotool.problem.rank_mean import Reduce
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule
from tests.hypergradient.stranger import Stranger
from tests.program.small import assert_identical, momentum, numbers, samples, sgd
from tests.programs import Point

BILEVEL = Graph({"u": ["w"]}, {"w": ["u"]})
TRILEVEL = Graph({"u": ["w"]}, {"w": ["v"], "v": ["u"]})


def w_loss(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    """H and M depend on the batch: means over ranks at the wrong places show."""
    point = w()
    return 0.5 * ((batch @ point) ** 2).mean() + 0.5 * (torch.exp(u() * batch) * point**2).mean(0).sum() + point[0]


def v_loss(batch: Tensor, *, v: Any, w: Any) -> Tensor:
    point = v()
    return ((batch @ point - w().sum()) ** 2).mean() + 0.3 * (point * w()).sum() + 0.1 * (point**4).sum()


def top_loss(batch: Tensor, *, below: Any, u: Any) -> Tensor:
    return ((batch @ below() - 1) ** 2).mean() + 0.1 * (u() ** 2 * batch**2).mean(0).sum()


Row = tuple[str, Tensor, Callable[..., Tensor], dict[str, str]]
W, V, U = numbers(0.5, -0.3, 0.8), numbers(0.2, 0.4, -0.1), numbers(0.1, 0.2, -0.4)


def program_of(
    rows: list[Row], graph: Graph, make: Callable[[], AbstractHypergradient], reduce: Reduce | None
) -> Program:
    optimizers = {"w": momentum, "u": sgd, "v": sgd}
    problems = [
        Problem(name, Point(value.clone()), loss, roles=roles, optimizer=optimizers[name], hypergradient=make())
        for name, value, loss, roles in rows
    ]
    return Program(problems, graph, reduce)


def program(graph: Graph, make: Callable[[], AbstractHypergradient], reduce: Reduce | None = None) -> Program:
    read = "w" if graph is BILEVEL else "v"
    rows: list[Row] = [("w", W, w_loss, {"w": "w", "u": "u"}), ("u", U, top_loss, {"below": read, "u": "u"})]
    if graph is TRILEVEL:
        rows.append(("v", V, v_loss, {"v": "v", "w": "w"}))
    return program_of(rows, graph, make, reduce)


def batches(graph: Graph) -> dict[str, Tensor]:
    return {name: samples(6, seed) for seed, name in enumerate("uw" if graph is BILEVEL else "uwv")}


class Recording:
    """The identity, with a list of what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def __call__(self, vector: Vector) -> Vector:
        self.seen.append([tensor.clone() for tensor in vector])
        return vector


ALGORITHMS: dict[str, tuple[Callable[[], AbstractHypergradient], int]] = {
    "identity": (lambda: Implicit(Identity(0.3)), 0),
    "neumann": (lambda: Implicit(Neumann(5, 0.2)), 4),
    "cg": (lambda: Implicit(ConjugateGradient(2, 0.0)), 2),
    "exact": (lambda: Implicit(Exact()), 3),
    "finite_difference": (lambda: Implicit(Identity(0.3), "finite_difference"), 0),
    "finite_difference_neumann": (lambda: Implicit(Neumann(5, 0.2), "finite_difference"), 4),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("graph", [BILEVEL, TRILEVEL], ids=["bilevel", "trilevel"])
def test_cotangents_products_and_the_gradient_are_reduced(name: str, graph: Graph) -> None:
    make, num_products = ALGORITHMS[name]
    recording = Recording()
    found = program(graph, make, recording).gradient("u", batches(graph))
    num_pullbacks = 1 if graph is BILEVEL else 2
    assert len(recording.seen) == num_pullbacks * (1 + num_products) + 1
    assert torch.equal(recording.seen[-1][0], found["x"])
    # The first is the cotangent: the gradient of the upper loss with respect to the solution that it reads.
    alone = program(graph, make)
    read = alone.problems["w" if graph is BILEVEL else "v"].module.x
    loss = top_loss(batches(graph)["u"], below=lambda: read, u=lambda: alone.problems["u"].module.x.detach())
    assert torch.allclose(recording.seen[0][0], torch.autograd.grad(loss, read)[0], rtol=1e-13)
    assert_identical(found, alone.gradient("u", batches(graph)))


class Ranks:
    """Two ranks as two threads; `reduce` waits for the other one's vector."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._vectors: list[Vector] = [[], []]
        self.num_calls = [0, 0]

    def reduce_of(self, rank: int) -> Reduce:
        def exchange(vector: Vector) -> Vector:
            self.num_calls[rank] += 1
            self._vectors[rank] = [tensor.detach().clone() for tensor in vector]
            self._barrier.wait()
            mean = [(a + b) / 2 for a, b in zip(*self._vectors, strict=True)]
            self._barrier.wait()
            return mean

        return exchange

    def run(self, work: Callable[[int, Reduce], Any]) -> list[Any]:
        results: list[Any] = [None, None]

        def target(rank: int) -> None:
            try:
                results[rank] = work(rank, self.reduce_of(rank))
            except BaseException as error:  # a thread's own would be lost
                self._barrier.abort()
                results[rank] = error

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def halves(rank: int, graph: Graph) -> dict[str, Tensor]:
    return {name: batch[3 * rank : 3 * rank + 3] for name, batch in batches(graph).items()}


def two_ranks(graph: Graph, make: Callable[[], AbstractHypergradient], name: str) -> list[dict[str, Tensor]]:
    return Ranks().run(lambda rank, reduce: program(graph, make, reduce).gradient(name, halves(rank, graph)))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("graph", [BILEVEL, TRILEVEL], ids=["bilevel", "trilevel"])
def test_two_ranks_equal_the_joined_batch(name: str, graph: Graph) -> None:
    make = ALGORITHMS[name][0]
    tolerance = 1e-5 if "finite" in name else 1e-11
    first, second = two_ranks(graph, make, "u")
    assert_identical(first, second)
    joined = program(graph, make).gradient("u", batches(graph))
    assert torch.allclose(first["x"], joined["x"], rtol=tolerance, atol=tolerance)
    # Without it the ranks would differ: the test has something to find.
    alone = [program(graph, make).gradient("u", halves(rank, graph))["x"] for rank in range(2)]
    assert not torch.allclose((alone[0] + alone[1]) / 2, joined["x"], rtol=1e-2)


def nested(make: Callable[[], AbstractHypergradient], reduce: Reduce | None = None) -> Program:
    """v shapes and reads w, so the pullback of w is differentiated."""

    def middle_loss(batch: Tensor, *, v: Any, w: Any, u: Any) -> Tensor:
        return v_loss(batch, v=v, w=w) + 2 * (torch.exp(u() * batch) * v() ** 2).mean(0).sum()

    rows: list[Row] = [
        ("w", W, w_loss, {"w": "w", "u": "v"}),
        ("v", V, middle_loss, {"v": "v", "w": "w", "u": "u"}),
        ("u", U, top_loss, {"below": "v", "u": "u"}),
    ]
    return program_of(rows, Graph({"u": ["v"], "v": ["w"]}, {"w": ["v"], "v": ["u"]}), make, reduce)


@pytest.mark.parametrize("name", ["neumann", "cg", "exact"])
def test_two_ranks_equal_the_joined_batch_where_a_pullback_is_differentiated(name: str) -> None:
    make = ALGORITHMS[name][0]
    work = [halves(rank, TRILEVEL) for rank in range(2)]
    first, second = Ranks().run(lambda rank, reduce: nested(make, reduce).gradient("u", work[rank]))
    assert_identical(first, second)
    joined = nested(make).gradient("u", batches(TRILEVEL))
    assert torch.allclose(first["x"], joined["x"], rtol=1e-11, atol=1e-11)
    alone = [nested(make).gradient("u", work[rank])["x"] for rank in range(2)]
    assert not torch.allclose((alone[0] + alone[1]) / 2, joined["x"], rtol=1e-2)


PROGRAMS: dict[str, Callable[[Callable[[], AbstractHypergradient], Reduce | None], Program]] = {
    "bilevel": lambda make, reduce: program(BILEVEL, make, reduce),
    "trilevel": lambda make, reduce: program(TRILEVEL, make, reduce),
    "nested": nested,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_algorithm_that_knows_nothing_of_ranks_is_right_on_two_and_one_that_reads_its_own_part_is_not(
    kind: str,
) -> None:
    assert _error_of(kind, Stranger) < 1e-11
    assert _error_of(kind, lambda: Stranger(is_careless=True)) > 1e-3


def _error_of(kind: str, make: Callable[[], AbstractHypergradient]) -> float:
    """Return how far the gradient of two ranks is from that of one process with both parts of the batch."""
    graph, build = BILEVEL if kind == "bilevel" else TRILEVEL, PROGRAMS[kind]
    found = Ranks().run(lambda rank, reduce: build(make, reduce).gradient("u", halves(rank, graph)))
    assert_identical(*found)
    joined = build(make, None).gradient("u", batches(graph))
    return float((found[0]["x"] - joined["x"]).norm() / joined["x"].norm())


def test_a_differentiated_solve_exchanges_its_adjoint_once() -> None:
    recording = Recording()
    nested(ALGORITHMS["exact"][0], recording).gradient("u", batches(TRILEVEL))
    num_products = 3  # of an exact solve with three parameters
    # The stationarity of v has the cotangent of w and a solve in it. A product with its derivative takes the adjoint's
    # right side and its solve, the cotangent of w and a solve, and the mean of the product. Then v's own cotangent, and
    # the gradient of u.
    expected = (1 + num_products) + num_products * (1 + num_products + 1 + num_products + 1) + 2
    assert len(recording.seen) == expected


def test_unused_parameters_are_not_stepped() -> None:
    """They are exchanged: another rank may use them."""

    module, recording = Point(numbers(0.5)), Recording()
    module.spare = torch.nn.Parameter(numbers(1.0, 2.0))
    decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    problem = Problem("w", module, lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"}, optimizer=decaying)
    Schedule(Program([problem], Graph(), recording)).tick()
    assert torch.equal(module.spare, numbers(1.0, 2.0))
    assert not torch.equal(module.x, numbers(0.5))
    assert [[tuple(tensor.shape) for tensor in vector] for vector in recording.seen] == [[(1,), (2,), (2,)]]
