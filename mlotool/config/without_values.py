"""Modules built for their decisions alone: without values, as far as they can be."""

from collections.abc import Callable
from typing import TypeVar

from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RefusedModelError

T = TypeVar("T")


class WithoutValues:
    """Builds modules without the values of their tensors; with them once code of the user's has asked for some."""

    def __init__(self) -> None:
        self._is_with_values = False

    def __call__(self, build: Callable[[], T]) -> T:
        """Return what a function builds.

        Args:
            build: may be called twice.

        Raises:
            InfeasibleModelError: decisions make no model.
            ConfigError: it cannot be built.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        if self._is_with_values:
            return build()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return build()
        except RefusedModelError:
            # What refuses tensors without values may take others.
            pass
        except InfeasibleModelError:
            raise
        except ConfigError as error:
            if isinstance(_first_cause(error), MlotoolError):
                raise
        # Code of the user's may need values.
        built = build()
        self._is_with_values = True
        return built


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
