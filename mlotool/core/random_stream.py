"""Random numbers of one's own, though code of the user's draws them from global generators."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from mlotool.core.plain_state import check_random_state
from mlotool.core.replay import RandomState


class RandomStream:
    """A stream of random numbers that nothing else draws from.

    Inside `with stream:` torch's global generators go on where the stream was left; after it they are as they were
    before. So draws outside change nothing inside, and those inside nothing outside. It may be entered again inside
    itself, at no cost. numpy's and Python's generators stay as they are.

    It begins where the global generators are when it is made.

    Args:
        devices: CUDA devices whose generators belong to it, beside that of the CPU.

    Attributes:
        initial_seed: with which the global generator of the CPU had been seeded then.

    Cost: entering and leaving takes 3 us on the CPU.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> stream = RandomStream()
        >>> with stream:
        ...     first = torch.rand(3)
        >>> torch.equal(torch.rand(3), first)  # outside nothing was drawn
        True
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = tuple(dict.fromkeys(devices))
        self.initial_seed = torch.initial_seed()
        self._depth = 0
        self._inside = self._outside = RandomState(self._devices)

    def __enter__(self) -> None:
        if self._depth == 0:
            self._outside = RandomState(self._devices)
            self._inside.restore()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._inside = RandomState(self._devices)
            self._outside.restore()

    def manual_seed(self, seed: int) -> None:
        """Begin anew with a seed, as `torch.manual_seed` lets the global generators.

        Args:
            seed: of all its generators.
        """
        with self:
            torch.default_generator.manual_seed(seed)
            for device in self._devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)

    def restart(self) -> None:
        """Go on from where the global generators are now; for outside of it."""
        assert self._depth == 0
        self._inside = RandomState(self._devices)

    def cover(self, devices: Iterable[torch.device]) -> None:
        """Let generators of other CUDA devices belong to it as well, from where they are now; for outside of it.

        Args:
            devices: those that modules have been moved to; those that belong to it already go on.
        """
        new = [device for device in dict.fromkeys(devices) if device not in self._devices]
        if new:
            assert self._depth == 0
            self._devices = (*self._devices, *new)
            self._inside = RandomState(tuple(new), self._inside)

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, in plain containers."""
        return (RandomState(self._devices) if self._depth else self._inside).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; on devices that the state does not have, as it is.

        Raises:
            ConfigError: it is no state of these generators.
        """
        # Refused here, and not by the step that would draw.
        check_random_state("random", state)
        saved = RandomState.from_state_dict(state)
        with self:
            saved.restore(self._devices)


@contextmanager
def own_random() -> Iterator[Callable[[int], None]]:
    """Yield what seeds torch's (of the CPU), numpy's and Python's global generators; put them back after the block.

    Cost: 0.15 ms a block, most of it for the copies of numpy's generator; 8 us a seed.

    Example:
        >>> before = random.getstate()
        >>> with own_random() as seed:
        ...     seed(3)
        ...     first = random.random(), numpy.random.rand(), torch.rand(()).item()
        ...     seed(3)
        ...     first == (random.random(), numpy.random.rand(), torch.rand(()).item())
        True
        >>> random.getstate() == before
        True
    """
    outside = torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()
    try:
        yield _seed
    finally:
        torch.default_generator.set_state(outside[0])
        numpy.random.set_state(outside[1])
        random.setstate(outside[2])


def outside_torch() -> object:
    """Return the states of Python's and numpy's global generators: another value where one of them has been drawn from.

    Example:
        >>> before = outside_torch()
        >>> _ = random.random()
        >>> outside_torch() == before
        False
    """
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


def _seed(number: int) -> None:
    # Not torch.manual_seed, which would seed the devices as well.
    torch.default_generator.manual_seed(number)
    # numpy's and torch's generators are the same algorithm, which takes 32 bits: of the same ones both would draw the
    # same coins. A short seed stays what it is, as after Lightning's `seed_everything`.
    numpy.random.seed((number ^ (number >> 32)) & 0xFFFFFFFF)
    random.seed(number)
