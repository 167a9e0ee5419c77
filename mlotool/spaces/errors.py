"""What is wrong with a model that decisions describe."""

from mlotool.core.errors import ConfigError


class InfeasibleModelError(ConfigError):
    """Decisions that make no model: its shapes do not fit. A sweep takes the next ones; a run ends."""
