"""`mlotool show RECIPE --parallel`: what speed layer-parallel training promises."""

import re

import pytest

from tests.cli.conftest import Call


def test_stages(call: Call) -> None:
    code, out, err = call("show", "layerparallel_resnet", "--parallel", "debug.limit_samples=120")
    assert code == 0, err
    balance, speed = out.splitlines()
    assert re.fullmatch(
        r"classifier: 3 stages begin at the input and at stages\.\d\.\d, stages\.\d\.\d; the longest takes \d\.\d\d "
        r"times the mean \(\S+ / \S+ / \S+ ms\)\.",
        balance,
    )
    assert re.search(r"at most \d\.\d\d times as fast as in one process, and \d\.\d\d times", speed)


def test_multigrid_by_its_critical_path(call: Call) -> None:
    """By hand: 8 chunks, one worker each, FCF, two cycles over grids of 32, 8 and 2 layers."""
    code, out, _ = call("show", "multigrid_peaks", "--parallel", "debug.limit_samples=300")
    assert code == 0
    assert "classifier: layers has 32 layers: forward and backward, a serial step evaluates 64 of them" in out
    assert "multigrid 456 on one worker and 100 on 8, which is at most 0.64 times as fast" in out


def test_plain_show_says_where_it_is(call: Call) -> None:
    code, out, _ = call("show", "layerparallel_resnet")
    assert code == 0 and (
        "# how fast layer-parallel training is to be expected to be: mlotool show layerparallel_resnet --parallel"
        in out
    )


def test_a_recipe_without_it_says_what_to_add(call: Call) -> None:
    code, _, err = call("show", "plain", "--parallel")
    assert code == 2 and "found no problem with a parallel setting" in err
    assert "+parallel@problems.classifier.parallel=penalty" in err


pytestmark = pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")
