"""Models that people have: all of them learns, also after an interruption; test_processes.py has them in several."""

import copy
from typing import Any

import pytest
import torch

from mlotool.layerparallel import Multigrid
from tests.layerparallel.auxiliary.test_processes import assert_equal
from tests.layerparallel.real_models import CASES, LAYERED, layered, spread, staged, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MAKERS: dict[str, Any] = {
    **{f"{model} {method}": lambda m=model, k=method: staged(m, k, processes=False) for model, method in CASES},
    **{f"{model} multigrid": lambda m=model: layered(m) for model in LAYERED if model != "resnet50"},
}

SECOND = ("decoder penalty", "stacked auxnet")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SECOND else n for n in MAKERS])
def test_all_parameters_learn_and_a_resumed_run_is_the_same_bit_by_bit(name: str) -> None:
    whole, second = MAKERS[name](), MAKERS[name]()
    before = {key: each.clone() for key, each in whole.problems["net"].module.named_parameters()}
    trained(whole, 2)  # a head that begins at zero lets the first step learn nothing below it
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    expected, resumed = trained(whole, 1), trained(second, 1)
    assert [key for key, each in before.items() if torch.equal(expected["net"][key], each)] == []
    assert_equal(resumed, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", LAYERED)
def test_gradients_of_multigrid_at_convergence_are_those_of_autograd(model: str) -> None:
    make, samples, part = LAYERED[model]
    torch.manual_seed(1)
    module, other = make().double(), make().double()
    other.load_state_dict(module.state_dict())
    parallel = Multigrid(part, coarsening=2, cycles=4)
    parallel.attach("net", module)
    batch = samples.__getitems__(range(4))
    mine, serial = (
        torch.autograd.grad(spread(batch, model=run), list(owner.parameters()))
        for run, owner in ((parallel, module), (other, other))
    )
    assert max(float(each.abs().max()) for each in serial) > 1e-6
    torch.testing.assert_close(mine, serial, rtol=1e-10, atol=1e-11)
    # Running statistics move once.
    torch.testing.assert_close(dict(module.named_buffers()), dict(other.named_buffers()), rtol=1e-12, atol=1e-12)
    assert all(solver.residuals for solver in parallel.solvers.values())
