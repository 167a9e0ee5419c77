"""What is known of a problem without torch: its settings, plain values that say how it steps, and its edges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, MinLen

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import Count, Precision, Rounds, Whole, parameters, setting_fault


@dataclass(frozen=True)
class ProblemSettings:
    """How a problem steps and computes. `Problem(..., unroll_steps=2)` takes them as keywords.

    Args:
        unroll_steps: optimizer steps it takes before the problems that read it step.
        warmup_steps: its first steps, which do not count for the problems above.
        roll_back: its steps are a look-ahead: after the upper step it returns to where it was, and takes one step.
        accumulate_batches: batches over which one gradient is averaged.
        gradient_clip_norm: largest 2-norm of its gradient; of each task's. None does not clip.
        scheduler_interval: "step" advances the scheduler after each optimizer step; "evaluation" leaves it to the
            runner.
        optimizer_roles: by hyperparameter of the optimizer (`lr`, `weight_decay`, ...), the problem whose module gives
            it, called without arguments: one value, one a parameter (1-D), or a mapping by parameter name.
        reset_to: where each unroll begins: "initial", or the parameters of a problem with the same ones; the
            optimizer then starts afresh. None goes on.
        tasks: gives the parameters a leading axis of that many tasks. Its loss, and the losses that read it, are
            evaluated for each task by itself (`torch.vmap`) on the task's part of the batch, along its first axis.
        precision: "fp32", or autocast around its loss: "bf16", or "fp16" with a loss scale of its own. Finite
            differences and penalties are taken in fp32 all the same; parameters and solvers stay in it.
        compile: run its module through `torch.compile`, but for evaluations whose second derivatives are taken.
        shard: on several ranks each holds a part of its parameters, of their gradient and of the optimizer's state
            (FSDP2). Gradients are of first order then. A list of patterns of parameters' names, such as
            `["head.*"]` (`*` is any text), divides those alone, and leaves the others whole on each rank; of a shared
            space a step gathers those that a rank's path reads.
        remat: blocks of its module of which only the inputs are kept for derivatives, by `mlotool.remat`, in every loss
            in which it plays: paths of submodules, such as `["blocks.*"]`, in which `*` is any text within one name; or
            "auto": blocks of layers in an nn.ModuleList, or repeated in an nn.Sequential. It trades time for memory, at
            every order.

    Example:
        >>> ProblemSettings(unroll_steps=2).unroll_steps
        2
    """

    unroll_steps: Count = 1
    warmup_steps: Whole = 0
    roll_back: bool = False
    accumulate_batches: Rounds = 1
    gradient_clip_norm: Annotated[float, Gt(0), Le(inf)] | None = None
    scheduler_interval: Literal["step", "evaluation"] = "step"
    optimizer_roles: Mapping[str, str] = field(default_factory=dict)
    reset_to: str | None = None
    tasks: Rounds | None = None
    precision: Precision = "fp32"
    compile: bool = False
    shard: bool | Annotated[Sequence[str], MinLen(1)] = False
    remat: str | Sequence[str] | None = None

    @classmethod
    def of(cls, problem: str, given: Mapping[str, Any]) -> "ProblemSettings":
        """Return the settings of a problem.

        Args:
            problem: its name, for messages.
            given: settings by name.

        Raises:
            ConfigError: one of them is unknown, of a wrong kind or out of range.
        """
        known = {name: parameter.annotation for name, parameter in parameters(cls).items()}  # type: ignore[arg-type]
        given = {name: value for name, value in given.items() if name != "optimizer_roles" or value is not None}
        for name, value in given.items():
            if name not in known:
                unknown = f"problems.{problem}: found the setting '{name}'; expected one of {', '.join(known)}."
                raise ConfigError(f"{unknown}{did_you_mean(name, known)} Correct the name.")
            fault = setting_fault(f"problems.{problem}.{name}", value, known[name])
            if fault is not None:
                raise ConfigError(fault)
        remat, shard = given.get("remat"), given.get("shard", False)
        own: dict[str, Any] = {"remat": remat if isinstance(remat, str) else tuple(remat or ()) or None}
        own["shard"] = shard if isinstance(shard, bool) else tuple(shard)
        return cls(**{**given, **own, "optimizer_roles": dict(given.get("optimizer_roles", {}))})

    @property
    def starts_from(self) -> str | None:
        """The problem whose parameters each unroll begins with; None where there is none."""
        return None if self.reset_to == "initial" else self.reset_to


@dataclass(frozen=True)
class ProblemNode:
    """What validation needs to know of a problem.

    Args:
        roles: the problem's name by role of its loss.
        other_uses: problems that it uses outside its loss, by key: `reset_to`, `optimizer.lr`.
    """

    roles: Mapping[str, str]
    other_uses: Mapping[str, str] = field(default_factory=dict)

    @property
    def uses(self) -> set[str]:
        """The names of all problems that it uses."""
        return {*self.roles.values(), *self.other_uses.values()}
