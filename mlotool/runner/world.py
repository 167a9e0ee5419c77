"""Which processes a run has, and where this one stands among them, from the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlotool.core.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The place of this process among those of a run.

    Args:
        rank: among all, from 0.
        size: how many there are.
        local_rank: among those of this machine: the number of its GPU.
        local_size: how many this machine has.
        address: of the machine of rank 0.
        port: on it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> "World | None":
        """Return what torchrun, our own launcher or SLURM's srun has set; None where this process is alone.

        Raises:
            ConfigError: only a part of it is set.
        """
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls._of_torchrun(environment)
        num_tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
        if "SLURM_PROCID" in environment and int(num_tasks) > 1:
            return cls._of_slurm(environment, int(num_tasks))
        return None

    def check_devices(self, devices: int | str) -> None:
        """Raise ConfigError where `runner.devices` is not the number of processes of this machine."""
        if devices not in ("auto", self.local_size):
            raise ConfigError(
                f"runner.devices: found {devices}, but the environment (RANK and WORLD_SIZE, or SLURM's) has "
                f"{self.local_size} processes on this machine; expected the same number, or auto. Set "
                f"runner.devices={self.local_size}, or clear these variables to start processes that do not belong "
                "together."
            )

    @classmethod
    def _of_torchrun(cls, environment: Mapping[str, str]) -> "World":
        missing = [key for key in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if key not in environment]
        if missing:
            raise ConfigError(
                f"The environment has RANK and WORLD_SIZE, but not {', '.join(missing)}; expected all that torchrun "
                "sets. Start it with torchrun, or clear RANK and WORLD_SIZE."
            )
        size = int(environment["WORLD_SIZE"])
        return cls(
            int(environment["RANK"]),
            size,
            int(environment["LOCAL_RANK"]),
            int(environment.get("LOCAL_WORLD_SIZE", size)),
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
        )

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str], size: int) -> "World":
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
        # "2(x3),1": two tasks on each of three machines, one on the last.
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", str(size)))
        sizes = [
            int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node) for _ in range(int(times or 1))
        ]
        node = int(environment.get("SLURM_NODEID", 0))
        # Jobs that share a machine must not share a port.
        port = 15000 + (int(environment.get("SLURM_JOB_ID", 0)) + int(environment.get("SLURM_STEP_ID", 0))) % 20000
        return cls(
            int(environment["SLURM_PROCID"]),
            size,
            int(environment.get("SLURM_LOCALID", 0)),
            sizes[min(node, len(sizes) - 1)],
            environment.get("MASTER_ADDR", first_host(nodes)),
            int(environment.get("MASTER_PORT", port)),
        )


def first_host(nodes: str) -> str:
    """Return the first machine of SLURM's list.

    Example:
        >>> first_host("gpu[007-009,12],cpu1"), first_host("login,gpu1")
        ('gpu007', 'login')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "")
