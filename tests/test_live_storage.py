import torch

from tests.live_storage import LiveStorage


def test_a_chain_of_operations_frees_what_it_has_read() -> None:
    x = torch.zeros(100)
    with LiveStorage() as live:
        y = (x + 1).square()
        assert (live.now, live.peak) == (400, 800)
        del y
        assert (live.now, live.peak) == (0, 800)
        live.reset_peak()
        assert live.peak == 0


def test_views_steps_in_place_and_what_was_there_cost_nothing() -> None:
    x = torch.zeros(10, 10)
    with LiveStorage() as live:
        view = x.view(-1)
        x.add_(1)
        assert live.peak == 0
        y = view * 2
        z = y[:3]
        del y
        assert live.now == 400  # a view keeps the whole storage
    del z
    assert live.now == 0


def test_what_a_graph_keeps_counts_until_the_graph_is_gone() -> None:
    weight = torch.zeros(10, 10, requires_grad=True)
    with LiveStorage() as live:
        loss = (weight @ weight).sin().sin().sum()
        assert live.now == 804  # the inputs of the two sines, and the loss
        del loss
        assert live.now == 0
