"""What a program refuses, and with which words; batches and modes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Identity, Implicit
from mlotool.program import Graph, Problem, Program
from tests import programs
from tests.program.reweighting import REVERSE, clean, relative_error, reweighting, sample_losses
from tests.program.small import Mlp, assert_identical, numbers, pair, parameters, run_ticks, samples
from tests.program.test_trace import alone, network
from tests.programs import Point


def test_a_role_in_eval_mode_uses_the_running_statistics() -> None:
    model = Mlp(nn.BatchNorm1d(5))
    with torch.no_grad():
        model.body[1].running_mean.fill_(0.7)
    program = reweighting(REVERSE, model, upper_roles={"model": {"problem": "model", "mode": "eval"}})  # type: ignore[dict-item]
    batch = samples(4, 5)
    found = program.loss("weigher", batch).loss
    assert model.training
    assert torch.allclose(found, clean(batch, model=model.eval()).detach(), rtol=1e-12)
    assert not torch.allclose(found, clean(batch, model=model.train()).detach(), rtol=1e-3)


def test_a_missing_hypergradient_is_an_error_with_what_to_write() -> None:
    message = r"problems.w.hypergradient: nothing is set; expected one.* Write hypergradient"
    with pytest.raises(ConfigError, match=message):
        pair({"hypergradient": None})
    problem = Problem("w", Point(numbers(1.0)), lambda batch, *, w: w().sum(), roles={"w": "w"})
    with pytest.raises(ConfigError, match=message):
        Program([problem], Graph()).solution("w")


def test_a_member_that_only_another_class_has_is_refused() -> None:
    directed: Any = type("Directed", (Implicit,), {"step_direction": print})
    with pytest.raises(ConfigError, match=r"a subclass of mlotool.program.AbstractDirector, as it has step_direction"):
        pair({"hypergradient": directed(Exact())})


@pytest.mark.parametrize("shapes_both", [False, True])
def test_finite_differences_are_refused_by_name_where_a_nested_problem_differentiates_them(shapes_both: bool) -> None:
    case = programs.nested(shapes_both=shapes_both)
    products = iter("finite_difference" if each == "low" else "reverse" for each in case.losses)
    with pytest.raises(ConfigError) as caught:
        case.program(lambda: Implicit(Exact(), next(products)))
    message = str(caught.value)
    found = "hypergradient.product: finite_difference with differentiated hypergradient"
    assert message.startswith(
        f"problems.low.hypergradient.product: found {found}; expected reverse, since the gradient"
    )
    assert "through the solution of 'low' is itself differentiated" in message
    assert "Write +hypergradient@problems.low.hypergradient=cg" in message
    case.program(lambda: Implicit(Exact(), "finite_difference", curvature="partial")).gradient("top")


def test_problems_of_one_name_and_unknown_ones_are_errors() -> None:
    program = reweighting(REVERSE)
    with pytest.raises(ConfigError, match=r"problems: found \['model', 'model'\]; expected names that differ. Rename"):
        Program([program.problems["model"]] * 2, Graph())
    for call in (
        lambda: program.gradient("weiger"),
        lambda: program.gradient("model", {"weiger": None}),
        lambda: program.loss("weiger"),
        lambda: program.solution("weiger"),
    ):
        with pytest.raises(ConfigError, match=r"Unknown problem 'weiger'; expected one of.*Did you mean 'weigher'"):
            call()


def test_the_pullbacks_batch_is_the_last_or_a_fresh_one() -> None:
    for rule, is_fresh in (("last", False), ("fresh", True)):
        program = reweighting(lambda rule=rule: Implicit(Identity(0.1), batch=rule))  # type: ignore[misc]
        stream = program.problems["model"].stream
        first, second = stream.next(), stream.peek()
        given = program.gradient("weigher", {"model": second if is_fresh else first})
        assert_identical(program.gradient("weigher"), given)
        other = program.gradient("weigher", {"model": first if is_fresh else second})
        assert relative_error(other, given) > 1e-3


@pytest.mark.parametrize("radius", [1e-7, 1e-3])
def test_the_radius_is_the_norm_of_the_perturbation(radius: float) -> None:
    seen = []

    def watching(batch: Tensor, *, model: Any, weigher: Any) -> Tensor:
        seen.append(torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()]))
        losses = sample_losses(batch, model)
        return (torch.sigmoid(weigher(losses[:, None])) * losses).mean()

    program = reweighting(lambda: Implicit(Identity(7.0), "finite_difference", radius=radius), lower=watching)
    program.gradient("weigher")
    # The first pullback also looks for hidden values.
    seen.clear()
    program.gradient("weigher")
    theta = torch.cat([tensor.detach().reshape(-1) for tensor in program.problems["model"].module.parameters()])
    assert len(seen) == 2
    assert [float((point - theta).norm()) for point in seen] == pytest.approx([radius, radius], rel=1e-6)
    assert torch.allclose(seen[0] + seen[1], 2 * theta, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: network(nn.BatchNorm1d(5).double()),
        lambda: network(nn.BatchNorm1d(5).double(), optimizer=torch.optim.AdamW),
        lambda: alone(optimizer=torch.optim.AdamW),
    ],
    ids=["momentum", "adamw", "traced"],
)
def test_a_copy_of_a_program_goes_on_as_the_original_would_and_leaves_it_alone(make: Callable[[], Program]) -> None:
    made = make()
    schedule = run_ticks(made, 4)
    before = parameters(made)
    copied = copy.deepcopy(made)
    run_ticks(copied, 4)
    assert all(map(torch.equal, parameters(made).values(), before.values()))
    for _ in range(4):
        schedule.tick()
    torch.testing.assert_close(parameters(made), parameters(copied), rtol=1e-12, atol=1e-12)
    assert not all(map(torch.equal, parameters(made).values(), before.values()))


def test_printed_it_says_who_minimizes_what() -> None:
    printed = repr(pair({"unroll_steps": 3}))
    lines = ["Program of 2 problems", "w* = argmin over w of lower_loss(w, u)", "min over u of upper_loss(w*)"]
    lines += ["Point with 3 parameters; SGD(lr=0.1); batches of 4 out of 12 samples", "3 steps for each step of u"]
    assert [line for line in (*lines, "u shapes w") if line not in printed] == []


@pytest.mark.parametrize("device", ["meta", "nowhere", 3])
def test_a_device_that_is_not_here_is_refused(device: Any) -> None:
    made = pair()
    assert made.to("cpu") is made
    with pytest.raises(ConfigError, match=r"Program\.to: found '?(meta|nowhere|3)"):
        made.to(device)
