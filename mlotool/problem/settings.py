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
    """How a problem steps and computes. `Problem(..., unroll_steps=2)` takes these settings as keywords.

    Args:
        unroll_steps: how many optimizer steps this problem takes before the problems that read it take one.
        warmup_steps: how many steps this problem takes before the problems that read it begin to step.
        roll_back: whether the `unroll_steps` steps are a look-ahead. After the upper step the problem then returns to
            the parameters before them, and takes one step.
        accumulate_batches: how many batches the gradient of one step is averaged over.
        gradient_clip_norm: the largest 2-norm of the gradient (with `tasks`, of each task's gradient). None does not
            clip.
        scheduler_interval: "step" advances the scheduler after each optimizer step, "evaluation" after each evaluation
            of the objective.
        optimizer_roles: for a hyperparameter of the optimizer (`lr`, `weight_decay`, ...), the name of the problem that
            learns it. That problem's module is called without arguments and returns one value, one value per parameter
            (1-D), or a mapping by parameter name.
        reset_to: the parameters that each unroll begins with: "initial", or the name of a problem whose parameters have
            the same names and shapes. The optimizer's state is then cleared. None goes on from the current parameters.
        tasks: a number of tasks; each task gets a copy of the parameters, along a new first axis. This problem's loss,
            and the losses that read it, are evaluated for each task by itself (`torch.vmap`) on the task's part of the
            batch, along the batch's first axis.
        precision: "fp32", or autocast around the loss: "bf16", or "fp16" with loss scaling. Parameters, solvers, finite
            differences and penalties stay in fp32.
        compile: whether the module runs through `torch.compile`, except where second derivatives are taken.
        shard: whether each of several processes (ranks) holds only a part of the parameters, their gradient and the
            optimizer's state (FSDP2). Only first-order gradients are then available. A list of patterns, such as
            `["head.*"]` (`*` is any text), divides only the parameters whose names match. In a shared space, a step
            gathers only the parameters that its path uses.
        remat: blocks of the module whose activations are not kept but computed again for derivatives of any order
            (`mlotool.remat`), in every loss that receives the module. This saves memory and costs time. Give paths of
            submodules, such as `["blocks.*"]`, in which `*` is any text within one name; or "auto": blocks of layers in
            an nn.ModuleList, or repeated in an nn.Sequential.

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
        """The problem whose parameters each unroll begins with; None if there is no such problem."""
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
