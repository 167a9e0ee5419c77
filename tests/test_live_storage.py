import torch

from tests.live_storage import LiveStorage


def test_what_lives_is_counted_once_until_it_is_gone() -> None:
    x = torch.zeros(10, 10)
    with LiveStorage() as live:
        y = (x + 1).square()
        assert (live.now, live.peak) == (400, 800)
        z = y.view(-1)[:3]
        del y
        assert live.now == 400  # a view keeps the whole storage
        x.add_(1)
        live.reset_peak()
        assert live.peak == 400, "steps in place and views of what was there cost nothing"
        del z
        weight = torch.zeros(10, 10).requires_grad_()
        loss = (weight @ weight).sin().sin().sum()
        assert live.now == 400 + 804  # the weight, the inputs of the two sines, and the loss
        del loss
        assert live.now == 400
