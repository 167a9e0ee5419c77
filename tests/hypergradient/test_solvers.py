"""The solvers against dense linear algebra, and how they end when they cannot succeed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import ConjugateGradient, Exact, FixedPoint, Identity, Neumann, NormalEquationConjugateGradient, Nystrom
from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status
from mlotool.problem.interface import Vector

SHAPES = [(2, 3), (), (4,), (1, 2)]
SIZE = 13


def flat(vector: Vector) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in vector])


def split(values: Tensor) -> list[Tensor]:
    parts = values.split([math.prod(shape) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    basis = torch.linalg.qr(rand(SIZE, SIZE, seed=seed))[0]
    return basis @ torch.diag(eigenvalues) @ basis.T


class Operator:
    """Products with a matrix, counted."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.num_products = 0

    def __call__(self, vector: Vector) -> list[Tensor]:
        assert [tuple(tensor.shape) for tensor in vector] == SHAPES
        self.num_products += 1
        return split(self.matrix @ flat(vector))


def solve(solver: AbstractSolver, matrix: Tensor, vector: Tensor) -> SolveResult:
    operator, given = Operator(matrix), split(vector.clone())
    result = solver.solve(operator, given)
    assert torch.equal(flat(given), vector)  # the cotangent belongs to the caller
    assert result.num_products == operator.num_products
    assert [tuple(tensor.shape) for tensor in result.solution] == SHAPES
    return result


def error(result: SolveResult, expected: Tensor) -> float:
    return float((flat(result.solution) - expected).norm() / expected.norm())


def true_residual(result: SolveResult, matrix: Tensor, vector: Tensor) -> float:
    return float((matrix @ flat(result.solution) - vector).norm() / vector.norm())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "solver",
    [
        ConjugateGradient(100, 1e-12),
        Exact(),
        Neumann(2000, 0.3),
        FixedPoint(2000, 0.3, 1e-13),
        NormalEquationConjugateGradient(200, 1e-13),
        Nystrom(SIZE, 1e-12),
        ConjugateGradient(100, 1e-12, damping=0.8),
        Exact(damping=0.8),
        NormalEquationConjugateGradient(200, 1e-13, damping=0.8),
    ],
    ids=str,
)
def test_the_solution_of_a_definite_system(solver: AbstractSolver, seed: int) -> None:
    """Damping is added to the diagonal, and makes it definite."""
    damping = getattr(solver, "damping", 0.0)
    eigenvalues = torch.linspace(0.1, 5.0, SIZE, dtype=torch.float64)
    undamped, vector = with_spectrum(eigenvalues - damping, seed), rand(SIZE, seed=10 + seed)
    result = solve(solver, undamped, vector)
    matrix = undamped + damping * torch.eye(SIZE, dtype=torch.float64)
    assert error(result, torch.linalg.solve(matrix, vector)) < 1e-10
    assert result.status is (Status.FIXED if isinstance(solver, Neumann | Nystrom) else Status.CONVERGED)
    if result.residual is not None:
        # Nystrom divides by rho, and its error with it.
        tolerance = 1e-10 if isinstance(solver, Nystrom) else 1e-12
        assert result.residual == pytest.approx(true_residual(result, matrix, vector), abs=tolerance)


def test_identity_scales_without_a_product() -> None:
    vector = rand(SIZE)
    for factor in (1.0, 0.25):
        result = solve(Identity(factor), torch.full((SIZE, SIZE), math.nan, dtype=torch.float64), vector)
        assert torch.equal(flat(result.solution), factor * vector)
        assert (result.status, result.num_products, result.residual) == (Status.FIXED, 0, None)


@pytest.mark.parametrize("num_terms", [1, 2, 5])
def test_neumann_and_a_fixed_point_from_zero_are_their_series(num_terms: int) -> None:
    matrix, vector, step = with_spectrum(torch.linspace(-1.0, 4.0, SIZE, dtype=torch.float64)), rand(SIZE), 0.3
    factor = torch.eye(SIZE, dtype=torch.float64) - step * matrix
    series = sum(torch.linalg.matrix_power(factor, k) for k in range(num_terms))
    for solver in (Neumann(num_terms, step), FixedPoint(num_terms, step)):
        result = solve(solver, matrix, vector)
        assert error(result, step * series @ vector) < 1e-13
        assert (result.status, result.num_products) == (Status.FIXED, num_terms - 1)


def krylov(matrix: Tensor, vector: Tensor, size: int) -> Tensor:
    """Return an orthonormal basis of span(v, Hv, ...)."""
    powers = [vector]
    for _ in range(size - 1):
        powers.append(matrix @ powers[-1])
    return torch.linalg.qr(torch.stack(powers, 1))[0]


@pytest.mark.parametrize("num_iterations", [1, 2, 4, 7])
def test_conjugate_gradient_is_the_best_of_its_krylov_space(num_iterations: int) -> None:
    """In the norm of H; that of the normal equations has the least residual."""
    matrix, vector = with_spectrum(torch.logspace(-1, 1, SIZE, dtype=torch.float64)), rand(SIZE)
    basis = krylov(matrix, vector, num_iterations)
    expected = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ vector)
    result = solve(ConjugateGradient(num_iterations, 0.0), matrix, vector)
    assert error(result, expected) < 1e-9
    assert (result.status, result.num_products) == (Status.MAX_ITERATIONS, num_iterations)
    assert result.residual == pytest.approx(true_residual(result, matrix, vector), rel=1e-9)
    if num_iterations == 7:
        return
    matrix = with_spectrum(torch.linspace(-2.0, 3.0, SIZE, dtype=torch.float64))
    basis = krylov(matrix @ matrix, matrix @ vector, num_iterations)
    expected = basis @ torch.linalg.lstsq(matrix @ basis, vector).solution
    result = solve(NormalEquationConjugateGradient(num_iterations, 0.0), matrix, vector)
    assert error(result, expected) < 1e-9
    assert (result.status, result.num_products) == (Status.MAX_ITERATIONS, 2 * num_iterations)
    assert result.residual == pytest.approx(true_residual(result, matrix, vector), rel=1e-9)


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        *[(ConjugateGradient, tolerance) for tolerance in (0.5, 1e-2, 1e-6)],
        *[(lambda count, tolerance: FixedPoint(count, 0.3, tolerance), tolerance) for tolerance in (0.1, 1e-3)],
    ],
)
def test_a_solver_stops_at_the_first_residual_within_tolerance(make: Any, tolerance: float) -> None:
    matrix, vector = with_spectrum(torch.logspace(-1, 0.6, SIZE, dtype=torch.float64)), rand(SIZE)
    result = solve(make(1000, tolerance), matrix, vector)
    assert result.status is Status.CONVERGED
    assert true_residual(result, matrix, vector) <= tolerance * (1 + 1e-6)
    shorter = solve(make(result.num_products - 1, 0.0), matrix, vector)
    assert true_residual(shorter, matrix, vector) > tolerance
    assert solve(make(result.num_products - 1, tolerance), matrix, vector).status is Status.MAX_ITERATIONS


@pytest.mark.parametrize(
    "solver",
    [
        ConjugateGradient(5, 1e-6),
        Exact(),
        Neumann(5, 0.1),
        Identity(),
        FixedPoint(5, 0.1),
        FixedPoint(5, 0.1, 1e-3),
        NormalEquationConjugateGradient(5, 1e-6),
        Nystrom(3, 0.1),
    ],
)
@pytest.mark.parametrize("kind", ["definite", "indefinite", "zero"])
def test_a_zero_vector_has_a_zero_solution(solver: AbstractSolver, kind: str) -> None:
    spectrum = {"definite": (1.0, 2.0), "indefinite": (-1.0, 1.0), "zero": (0.0, 0.0)}[kind]
    matrix = with_spectrum(torch.linspace(*spectrum, SIZE, dtype=torch.float64) + 1e-3 * (kind == "indefinite"))
    result = solve(solver, matrix, torch.zeros(SIZE, dtype=torch.float64))
    assert torch.equal(flat(result.solution), torch.zeros(SIZE, dtype=torch.float64))
    assert result.residual in (None, 0.0)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_negative_curvature_at_once_gives_v_over_its_size(scale: float) -> None:
    """The scale of H is that of the answer: 1/c of the one for H is the one for c H."""
    matrix, vector = with_spectrum(torch.linspace(-3.0, 0.5, SIZE, dtype=torch.float64)), rand(SIZE)
    assert vector @ matrix @ vector < 0
    result = solve(ConjugateGradient(10, 1e-6), scale * matrix, vector)
    assert (result.status, result.num_products) == (Status.NEGATIVE_CURVATURE, 1)
    expected = vector * (vector @ vector) / abs(vector @ matrix @ vector)
    assert torch.allclose(scale * flat(result.solution), expected, rtol=1e-12)
    assert result.residual == pytest.approx(true_residual(result, scale * matrix, vector), rel=1e-12)
    # Also that of v, and with damping.
    larger = solve(ConjugateGradient(10, 1e-6, 0.1 * scale), scale * matrix, 5.0 * vector)
    damped = abs(vector @ matrix @ vector + 0.1 * vector @ vector)
    assert torch.allclose(scale * flat(larger.solution), 5.0 * vector * (vector @ vector) / damped, rtol=1e-12)


def issue(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A program's lower Hessian, and the cotangent at its stationary point."""
    matrix = torch.diag(torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64))
    lam, target = torch.ones(3, dtype=torch.float64), torch.tensor([0.3, 0.2, -1.0], dtype=torch.float64)
    return scale * matrix, torch.linalg.solve(matrix, lam) - target


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_negative_curvature_keeps_the_step_before_though_its_residual_is_larger_than_that_of_zero(scale: float) -> None:
    matrix, vector = issue(scale)
    result = ConjugateGradient().solve(lambda u: [matrix @ u[0]], [vector])
    assert result.status is Status.NEGATIVE_CURVATURE
    first = float(vector @ vector / (vector @ matrix @ vector)) * vector
    assert torch.allclose(result.solution[0], first, rtol=1e-12)
    assert result.residual == pytest.approx(float((matrix @ first - vector).norm() / vector.norm()), rel=1e-9)
    assert result.residual > 1


def test_a_warm_start_is_kept_where_the_first_direction_has_negative_curvature() -> None:
    matrix, vector = issue()
    exact = torch.linalg.solve(matrix, vector)
    start = exact + torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64)
    result = ConjugateGradient().solve(lambda u: [matrix @ u[0]], [vector], start=[start])
    assert result.status is Status.NEGATIVE_CURVATURE
    assert torch.equal(result.solution[0], start)
    for bad in (math.nan, 1e300):
        cold = ConjugateGradient().solve(lambda u: [matrix @ u[0]], [vector], start=[torch.full_like(start, bad)])
        first = float(vector @ vector / (vector @ matrix @ vector)) * vector
        assert torch.allclose(cold.solution[0], first, rtol=1e-12)


@pytest.mark.parametrize("make", [ConjugateGradient, NormalEquationConjugateGradient], ids=["cg", "normal_cg"])
@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e25])
def test_a_vector_whose_square_leaves_float32_is_solved_all_the_same(make: Any, scale: float) -> None:
    matrix = with_spectrum(torch.linspace(1.0, 3.0, SIZE, dtype=torch.float64)).float()
    vector = rand(SIZE).float()
    expected = solve(make(20, 1e-5), matrix, vector)
    found = make(20, 1e-5).solve(Operator(matrix), split(scale * vector))
    assert (found.status, found.num_products) == (expected.status, expected.num_products)
    ratio = flat(found.solution).double() / (scale * flat(expected.solution).double())
    assert float((ratio - 1).abs().max()) < 1e-4


@pytest.mark.parametrize("solver", [Neumann(20, 0.5), FixedPoint(20, 0.5)], ids=["neumann", "fixed_point"])
def test_a_series_that_diverges_while_finite_says_why(solver: AbstractSolver) -> None:
    vector = rand(SIZE)
    too_far = with_spectrum(torch.linspace(1.0, 7.0, SIZE, dtype=torch.float64))
    result = solve(solver, too_far, vector)
    assert result.status is Status.DIVERGED
    assert float(flat(result.solution).norm()) > 1e3
    assert "Lower step_size" in solver.failures[Status.DIVERGED]
    indefinite = with_spectrum(torch.linspace(-1.0, 3.0, SIZE, dtype=torch.float64))
    assert solve(solver, indefinite, vector).status is Status.NEGATIVE_CURVATURE
    nearly = with_spectrum(torch.linspace(0.0, 3.99, SIZE, dtype=torch.float64))
    assert solve(solver, nearly, vector).status is Status.FIXED


@pytest.mark.parametrize("seed", range(3))
def test_a_matrix_that_is_singular_up_to_rounding_gives_the_least_squares_solution(seed: int) -> None:
    """LU finds no zero pivot there, but a huge vector."""
    eigenvalues = torch.linspace(-2.0, 3.0, SIZE, dtype=torch.float64)
    eigenvalues[:3] = 0
    matrix, vector = with_spectrum(eigenvalues, seed), rand(SIZE, seed=10 + seed)
    expected = torch.linalg.pinv(matrix, rtol=1e-8) @ vector
    for solver, tolerance in ((Exact(), 1e-10), (NormalEquationConjugateGradient(200, 1e-10), 1e-8)):
        result = solve(solver, matrix, vector)
        assert result.status is Status.SINGULAR
        assert error(result, expected) < tolerance
        assert result.residual == pytest.approx(true_residual(result, matrix, vector), rel=1e-9)
    nothing = solve(NormalEquationConjugateGradient(5, 1e-6), torch.zeros(SIZE, SIZE, dtype=torch.float64), vector)
    assert (nothing.status, float(flat(nothing.solution).norm())) == (Status.SINGULAR, 0.0)


@pytest.mark.parametrize(
    "solver",
    [
        ConjugateGradient(20, 1e-10),
        Exact(),
        NormalEquationConjugateGradient(20, 1e-10),
        FixedPoint(20, 0.1),
        FixedPoint(20, 0.1, 1e-10),
        Nystrom(SIZE, 0.1),
    ],
    ids=["cg", "exact", "normal_cg", "fixed_point", "fixed_point with tolerance", "nystrom"],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_product_is_a_status_and_nan(solver: AbstractSolver, bad: float) -> None:
    matrix, vector = with_spectrum(torch.linspace(1.0, 3.0, SIZE, dtype=torch.float64)), rand(SIZE)
    matrix[2, 3] = bad
    result = solve(solver, matrix, vector)
    assert result.status is Status.NON_FINITE
    assert bool(flat(result.solution).isnan().all())


def test_conjugate_gradient_on_a_system_without_a_solution_ends_with_its_least_residual() -> None:
    """Unchecked, it grows without bounds along what H annuls."""
    eigenvalues = torch.linspace(1.0, 3.0, SIZE, dtype=torch.float64)
    eigenvalues[:2] = 0
    for dtype in (torch.float64, torch.float32):
        matrix, vector = with_spectrum(eigenvalues).to(dtype), rand(SIZE).to(dtype)
        result = solve(ConjugateGradient(200, 1e-6), matrix, vector)
        assert result.status in (Status.SINGULAR, Status.NEGATIVE_CURVATURE)  # of zero and rounding
        assert result.residual == pytest.approx(true_residual(result, matrix, vector), rel=1e-3)
        assert true_residual(result, matrix, vector) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_normal_equations_solve_an_indefinite_system(scale: float, dtype: torch.dtype) -> None:
    eigenvalues = torch.cat([torch.linspace(-3, -0.5, 6), torch.linspace(0.5, 3, SIZE - 6)]).double()
    matrix, vector = with_spectrum(eigenvalues).to(dtype), scale * rand(SIZE).to(dtype)
    result = solve(NormalEquationConjugateGradient(300, 0.0), matrix, vector)
    assert result.status is Status.CONVERGED
    assert error(result, torch.linalg.solve(matrix, vector)) < 100 * torch.finfo(dtype).eps
    assert solve(ConjugateGradient(300, 0.0), matrix, vector).status is Status.NEGATIVE_CURVATURE


@pytest.mark.parametrize("num_iterations", [150, 1000])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_a_fixed_point_that_overflows_is_nan(num_iterations: int, tolerance: float) -> None:
    vector = rand(SIZE)
    matrix = with_spectrum(torch.linspace(1.0, 200.0, SIZE, dtype=torch.float64))
    result = solve(FixedPoint(num_iterations, 1.0, tolerance), matrix, vector)
    assert result.status is Status.NON_FINITE
    assert bool(flat(result.solution).isnan().all())


class Columns(Operator):
    """Which columns a solver asks for."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.indices: list[int] = []

    def __call__(self, vector: Vector) -> list[Tensor]:
        values = flat(vector)
        # The last product is not with a column: it measures the residual.
        if sorted(values.tolist()) == [0.0] * (SIZE - 1) + [1.0]:
            self.indices.append(int(values.argmax()))
        return super().__call__(vector)


@pytest.mark.parametrize("rho", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("rank", [1, 4, 9, 30])
def test_nystrom_is_the_inverse_of_its_approximation_and_within_its_bound(rank: int, rho: float) -> None:
    matrix, vector = with_spectrum(torch.logspace(-3, 1, SIZE, dtype=torch.float64)), rand(SIZE)
    operator = Columns(matrix)
    result = Nystrom(rank, rho).solve(operator, split(vector))
    assert len(set(operator.indices)) == len(operator.indices) == min(rank, SIZE)
    assert result.num_products == operator.num_products == min(rank, SIZE) + 1
    columns = matrix[:, operator.indices]
    approximation = columns @ torch.linalg.pinv(columns[operator.indices], hermitian=True) @ columns.T
    identity = torch.eye(SIZE, dtype=torch.float64)
    inverse = torch.linalg.inv(approximation + rho * identity)
    assert error(result, inverse @ vector) < 1e-12 * 10 / rho + 1e-10
    missed = float(torch.linalg.matrix_norm(matrix - approximation, 2))
    bound = missed / (rho * (rho + missed)) * float(vector.norm())
    exact = torch.linalg.solve(matrix + rho * identity, vector)
    assert float((flat(result.solution) - exact).norm()) <= bound * (1 + 1e-9) + 1e-9 * float(exact.norm())
    residual = true_residual(result, matrix + rho * identity, vector)
    assert result.residual == pytest.approx(residual, rel=1e-6, abs=1e-9)
    assert result.status is (Status.INACCURATE if residual > 1 else Status.FIXED)


def test_nystrom_of_an_indefinite_matrix_leaves_negative_curvature_out() -> None:
    matrix, vector = torch.diag(torch.linspace(-2.0, 3.0, SIZE, dtype=torch.float64)), rand(SIZE)
    result = solve(Nystrom(SIZE, 0.1), matrix, vector)
    assert result.status is Status.NEGATIVE_CURVATURE
    assert error(result, vector / (matrix.diagonal().clamp_min(0) + 0.1)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize(("rho", "small"), [(1e-4, 1.0), (1e-2, 1.0), (1e-2, 100.0), (1.0, 100.0)])
def test_nystrom_on_a_badly_scaled_matrix_says_that_it_is_wrong(
    rho: float, small: float, rank: int, dtype: torch.dtype
) -> None:
    """v is along the large eigenvalues but for a little: the residual is small, and q too long by small / rho."""
    eigenvalues = torch.full((SIZE,), small, dtype=torch.float64)
    eigenvalues[:2] = 1e6
    basis = torch.linalg.qr(rand(SIZE, SIZE))[0]
    matrix, vector = (basis * eigenvalues) @ basis.T, basis[:, 0] + 0.3 * rho / small * basis[:, 2:].sum(1)
    result = solve(Nystrom(rank, rho), matrix.to(dtype), vector.to(dtype))
    exact = torch.linalg.solve(matrix + rho * torch.eye(SIZE, dtype=torch.float64), vector)
    assert float((flat(result.solution).double() - exact).norm() / exact.norm()) > 1
    assert result.status is Status.INACCURATE
    assert "Raise rank or rho" in Nystrom.failures[result.status]
