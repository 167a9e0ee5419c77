"""Small programs in float64 with a reference gradient from a plain autograd program of their own.

The reference solves each level by Newton's method on a function written with torch alone, then takes differentiable
Newton steps from the solution.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from mlotool.program import AbstractHypergradient, Graph, Problem, Program


class Point(nn.Module):
    """A parameter that is its own output."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(value.clone())

    def forward(self) -> Tensor:
        return self.x


def newton(gradient: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the root of `gradient`, differentiable with respect to whatever it closes over.

    A step squares the error, so of the Taylor series as well: the first makes first derivatives exact, the second
    those up to the third, which is what the innermost of three nested levels needs.
    """

    def step(x: Tensor, create_graph: bool) -> Tensor:
        with torch.enable_grad():
            y = x if create_graph else x.detach()
            y = y if y.requires_grad else y.requires_grad_()
            value = gradient(y)
            rows = [
                torch.autograd.grad(value, y, row, retain_graph=True, create_graph=create_graph)[0]
                for row in torch.eye(len(y), dtype=y.dtype)
            ]
            return y - torch.linalg.solve(torch.stack(rows), value)

    x = start
    for _ in range(40):
        moved = step(x, False).detach()
        done = torch.allclose(moved, x, rtol=0, atol=1e-13)
        x = moved
        if done:
            break
    for _ in range(2):
        x = step(x, True)
    return x


def matrix(seed: int, size: int = 3) -> Tensor:
    return _drawn(seed, size, size)


def definite(seed: int, size: int = 3) -> Tensor:
    a = matrix(seed, size)
    return a @ a.T / size + torch.eye(size, dtype=torch.float64)


def vector(seed: int, size: int = 3) -> Tensor:
    return _drawn(seed, size)


def _drawn(seed: int, *shape: int) -> Tensor:
    """Return the same numbers on any default device: they are drawn on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


@dataclass
class Case:
    """A program, the problem whose gradient is asked for, and its reference."""

    losses: dict[str, Callable[..., Tensor]]
    upper_to_lower: dict[str, list[str]]
    lower_to_upper: dict[str, list[str]]
    solve: Callable[[Tensor], dict[str, Tensor]]
    top: str
    start: Tensor = field(default_factory=lambda: vector(99))

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """The start, and the solutions as functions of it."""
        top = self.start.clone().requires_grad_()
        return {self.top: top, **self.solve(top)}

    def reference(self) -> Tensor:
        """Return the gradient of the top loss of the solved program."""
        loss = self.losses[self.top](**{name: self.values[name] for name in self._roles(self.top)})
        return torch.autograd.grad(loss, self.values[self.top], retain_graph=True)[0]

    def program(self, make: Callable[[], AbstractHypergradient]) -> Program:
        """Return the program at the solutions of all lower problems."""
        problems = []
        for name, loss in self.losses.items():
            roles = {role: role for role in self._roles(name)}
            problems.append(
                Problem(name, Point(self.values[name].detach()), _as_loss(loss), roles=roles, hypergradient=make())
            )
        return Program(problems, Graph(self.upper_to_lower, self.lower_to_upper))

    def _roles(self, name: str) -> list[str]:
        code = self.losses[name].__code__
        return list(code.co_varnames[: code.co_argcount])


def _as_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda batch, **roles: loss(**{name: role() for name, role in roles.items()})


def _quadratic(x: Tensor, hessian: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (x - target) @ hessian @ (x - target)


def _minimise(loss: Callable[[Tensor], Tensor], size: int = 3) -> Tensor:
    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(loss(x), x, create_graph=True)[0]

    return newton(gradient, torch.zeros(size, dtype=torch.float64))


def bilevel(cubic: float = 0.0) -> Case:
    h, m, t = definite(1), matrix(2), vector(3)

    def w(w: Tensor, lam: Tensor) -> Tensor:
        return _quadratic(w, h, m @ lam) + cubic * (w**4).sum() + cubic * (w**2 * lam).sum()

    def lam(lam: Tensor, w: Tensor) -> Tensor:
        return _quadratic(w, h, t) + 0.1 * (lam**2).sum()

    return Case(
        {"w": w, "lam": lam}, {"lam": ["w"]}, {"w": ["lam"]}, lambda a: {"w": _minimise(lambda x: w(x, a))}, "lam"
    )


def ridge(cubic: float = 0.0) -> Case:
    """Ridge regression whose penalty `exp(lam)` is chosen on other data; w has a closed form."""
    inputs, targets, other_inputs, other_targets = regression_data()

    def w(w: Tensor, lam: Tensor) -> Tensor:
        return 0.5 * ((inputs @ w - targets) ** 2).mean() + 0.5 * lam.exp().sum() * (w**2).sum() + cubic * (w**4).sum()

    def lam(w: Tensor) -> Tensor:
        return 0.5 * ((other_inputs @ w - other_targets) ** 2).mean()

    def solve(a: Tensor) -> dict[str, Tensor]:
        return {"w": _minimise(lambda x: w(x, a))}

    return Case({"w": w, "lam": lam}, {"lam": ["w"]}, {"w": ["lam"]}, solve, "lam", start=vector(98, 1))


def regression_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and targets of two samples."""
    return matrix(61, 8)[:, :3], vector(62, 8), matrix(63, 8)[:, :3], vector(64, 8)


def logistic(cubic: float = 0.0) -> Case:
    """Logistic regression with a weight decay `exp(lam)` of each parameter."""
    inputs, targets, other_inputs, other_targets = regression_data()

    def w(w: Tensor, lam: Tensor) -> Tensor:
        loss = torch.nn.functional.softplus(-targets.sign() * (inputs @ w)).mean()
        return loss + 0.5 * (lam.exp() * w**2).sum() + cubic * (w**4).sum()

    def lam(lam: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-other_targets.sign() * (other_inputs @ w)).mean() + 0.01 * (lam**2).sum()

    return Case(
        {"w": w, "lam": lam}, {"lam": ["w"]}, {"w": ["lam"]}, lambda a: {"w": _minimise(lambda x: w(x, a))}, "lam"
    )


def ladder(cubic: float = 0.0) -> Case:
    """Three rungs of two problems, each of which shapes both of the next: eight paths."""
    h = [definite(70 + i, 2) for i in range(6)]
    m = [matrix(80 + i, 2) for i in range(12)]

    def rung(x: Tensor, number: int, first: Tensor, second: Tensor) -> Tensor:
        target = m[2 * number] @ first + m[2 * number + 1] @ second
        return _quadratic(x, h[number], target) + cubic * (x**4).sum()

    def a1(a1: Tensor, top: Tensor) -> Tensor:
        return rung(a1, 0, top, top**2)

    def b1(b1: Tensor, top: Tensor) -> Tensor:
        return rung(b1, 1, top, top**2)

    def a2(a2: Tensor, a1: Tensor, b1: Tensor) -> Tensor:
        return rung(a2, 2, a1, b1)

    def b2(b2: Tensor, a1: Tensor, b1: Tensor) -> Tensor:
        return rung(b2, 3, a1, b1)

    def a3(a3: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        return rung(a3, 4, a2, b2)

    def b3(b3: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        return rung(b3, 5, a2, b2)

    def top(top: Tensor, a3: Tensor, b3: Tensor) -> Tensor:
        return (a3 * b3).sum() + 0.5 * (a3**2).sum() + 0.1 * (top**2).sum()

    def solve(a: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for loss, names in [(a1, "a1"), (b1, "b1"), (a2, "a2"), (b2, "b2"), (a3, "a3"), (b3, "b3")]:
            rung_below = {"1": (a,), "2": (found.get("a1"), found.get("b1")), "3": (found.get("a2"), found.get("b2"))}
            found[names] = _minimise(lambda x, f=loss, s=rung_below[names[1]]: f(x, *s), size=2)
        return found

    losses = {"a1": a1, "b1": b1, "a2": a2, "b2": b2, "a3": a3, "b3": b3, "top": top}
    graph = (
        {"top": ["a1", "b1"]},
        {"a1": ["a2", "b2"], "b1": ["a2", "b2"], "a2": ["a3", "b3"], "b2": ["a3", "b3"], "a3": ["top"], "b3": ["top"]},
    )
    return Case(losses, *graph, solve, "top", start=vector(99, 2))


def trilevel(cubic: float = 0.0) -> Case:
    """Domain adaptation's graph: top shapes pretrain, pretrain -> finetune -> top."""
    h1, h2, m1, m2, t = definite(4), definite(5), matrix(6), matrix(7), vector(8)

    def pretrain(pretrain: Tensor, top: Tensor) -> Tensor:
        return _quadratic(pretrain, h1, m1 @ top) + cubic * (pretrain**4).sum()

    def finetune(finetune: Tensor, pretrain: Tensor) -> Tensor:
        return _quadratic(finetune, h2, m2 @ pretrain) + cubic * (finetune**4).sum()

    def top(top: Tensor, finetune: Tensor) -> Tensor:
        return _quadratic(finetune, h1, t) + (top**2).sum()

    def solve(a: Tensor) -> dict[str, Tensor]:
        p = _minimise(lambda x: pretrain(x, a))
        return {"pretrain": p, "finetune": _minimise(lambda x: finetune(x, p))}

    losses = {"pretrain": pretrain, "finetune": finetune, "top": top}
    return Case(losses, {"top": ["pretrain"]}, {"pretrain": ["finetune"], "finetune": ["top"]}, solve, "top")


def two_path(cubic: float = 0.0) -> Case:
    """The three-level program with the extra edges: top shapes both, and reads both."""
    h1, h2, m1, m2, m3, t = definite(9), definite(10), matrix(11), matrix(12), matrix(13), vector(14)

    def low(low: Tensor, top: Tensor) -> Tensor:
        return _quadratic(low, h1, m1 @ top) + cubic * (low**4).sum()

    def mid(mid: Tensor, low: Tensor, top: Tensor) -> Tensor:
        return _quadratic(mid, h2, m2 @ low + m3 @ top) + cubic * (mid**2 * top).sum() + cubic * (mid**4).sum()

    def top(top: Tensor, mid: Tensor, low: Tensor) -> Tensor:
        return _quadratic(mid, h1, t) + low @ mid + 0.3 * (top**2).sum()

    def solve(a: Tensor) -> dict[str, Tensor]:
        x = _minimise(lambda x: low(x, a))
        return {"low": x, "mid": _minimise(lambda y: mid(y, x, a))}

    losses = {"low": low, "mid": mid, "top": top}
    return Case(losses, {"top": ["low", "mid"]}, {"low": ["mid", "top"], "mid": ["top"]}, solve, "top")


def diamond(cubic: float = 0.0) -> Case:
    h, m = [definite(20 + i) for i in range(4)], [matrix(30 + i) for i in range(5)]

    def base(base: Tensor, top: Tensor) -> Tensor:
        return _quadratic(base, h[0], m[0] @ top) + cubic * (base**4).sum()

    def left(left: Tensor, base: Tensor) -> Tensor:
        return _quadratic(left, h[1], m[1] @ base) + cubic * (left**4).sum()

    def right(right: Tensor, base: Tensor) -> Tensor:
        return _quadratic(right, h[2], m[2] @ base) + cubic * (right**2 * base).sum() + cubic * (right**4).sum()

    def top(top: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return _quadratic(left, h[3], right) + 0.2 * (top**2).sum() + (left * right * top).sum()

    def solve(a: Tensor) -> dict[str, Tensor]:
        b = _minimise(lambda x: base(x, a))
        return {"base": b, "left": _minimise(lambda x: left(x, b)), "right": _minimise(lambda x: right(x, b))}

    losses = {"base": base, "left": left, "right": right, "top": top}
    graph = {"top": ["base"]}, {"base": ["left", "right"], "left": ["top"], "right": ["top"]}
    return Case(losses, *graph, solve, "top")


def nested(cubic: float = 0.0, shapes_both: bool = True) -> Case:
    """The middle problem reads AND shapes the lower one; the top shapes the middle one, or both."""
    h1, h2, m1, m2, m3, m4 = definite(40), definite(41), matrix(42), 0.3 * matrix(43), matrix(44), 0.3 * matrix(45)
    both = 1.0 if shapes_both else 0.0

    def low_value(low: Tensor, mid: Tensor, top: Tensor | float) -> Tensor:
        shift = m3 @ top if isinstance(top, Tensor) else 0.0
        return _quadratic(low, h1, m1 @ mid + both * shift) + cubic * (low**4).sum() + cubic * (low**2 * mid).sum()

    def low3(low: Tensor, mid: Tensor, top: Tensor) -> Tensor:
        return low_value(low, mid, top)

    def low2(low: Tensor, mid: Tensor) -> Tensor:
        return low_value(low, mid, 0.0)

    def mid(mid: Tensor, low: Tensor, top: Tensor) -> Tensor:
        return _quadratic(mid, h2, m4 @ top) + 0.5 * (low**2).sum() + low @ m2 @ mid + cubic * (mid**4).sum()

    def top(top: Tensor, mid: Tensor, low: Tensor) -> Tensor:
        return _quadratic(low, h2, mid) + 0.2 * (top**2).sum()

    def solve_low(b: Tensor, a: Tensor) -> Tensor:
        return _minimise(lambda x: low_value(x, b, a if shapes_both else 0.0))

    def solve(a: Tensor) -> dict[str, Tensor]:
        b = _minimise(lambda x: mid(x, solve_low(x, a), a))
        return {"mid": b, "low": solve_low(b, a)}

    losses = {"low": low3 if shapes_both else low2, "mid": mid, "top": top}
    graph = {"top": ["mid", "low"] if shapes_both else ["mid"], "mid": ["low"]}, {"low": ["mid", "top"], "mid": ["top"]}
    return Case(losses, *graph, solve, "top")


def doubly_nested(cubic: float = 0.0) -> Case:
    """Three nested levels under a top: the pullback of a pullback is differentiated. Scalars: the reference is slow."""
    h1, h2, h3 = definite(50, 1), definite(51, 1), definite(52, 1)
    m1, m2, m3, m4, m5 = (0.3 * matrix(53 + i, 1) for i in range(5))

    def low(low: Tensor, mid: Tensor) -> Tensor:
        return _quadratic(low, h1, m1 @ mid) + cubic * (low**4).sum() + cubic * (low**2 * mid).sum()

    def mid(mid: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return _quadratic(mid, h2, m2 @ high) + 0.3 * (low**2).sum() + low @ m3 @ mid + cubic * (mid**4).sum()

    def high(high: Tensor, mid: Tensor, top: Tensor) -> Tensor:
        return _quadratic(high, h3, m4 @ top) + 0.3 * (mid**2).sum() + mid @ m5 @ high + cubic * (high**4).sum()

    def top(top: Tensor, high: Tensor) -> Tensor:
        return _quadratic(high, h1, top)

    def solve_low(b: Tensor) -> Tensor:
        return _minimise(lambda x: low(x, b), size=1)

    def solve_mid(c: Tensor) -> Tensor:
        return _minimise(lambda x: mid(x, solve_low(x), c), size=1)

    def solve(a: Tensor) -> dict[str, Tensor]:
        c = _minimise(lambda x: high(x, solve_mid(x), a), size=1)
        b = solve_mid(c)
        return {"high": c, "mid": b, "low": solve_low(b)}

    losses = {"low": low, "mid": mid, "high": high, "top": top}
    graph = {"top": ["high"], "high": ["mid"], "mid": ["low"]}, {"low": ["mid"], "mid": ["high"], "high": ["top"]}
    return Case(losses, *graph, solve, "top", start=vector(99, 1))
