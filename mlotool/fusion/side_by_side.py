"""What programs share that take their ticks by themselves, one after the other in one process."""

from collections.abc import Sequence

from mlotool.fusion.shared_prefix import SharedPrefix, share_prefixes
from mlotool.fusion.shared_reads import SharedReads, share_reads
from mlotool.problem.stream import Stream
from mlotool.program import Program


class SideBySide:
    """The batches that several programs ask for are read once, and frozen parts that they have in common run once."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._prefixes: list[SharedPrefix] = []
        self._reads: list[SharedReads] = []

    def take(self, programs: Sequence[Program]) -> None:
        """Let programs share from now on; nothing happens where they are the same ones as before.

        Args:
            programs: that take their ticks by themselves.
        """
        if [*map(id, programs)] == [*map(id, self._programs)]:
            return
        self._end()
        self._programs = [*programs]
        if len(programs) > 1:
            problems = [problem for program in programs for problem in program.problems.values()]
            self._prefixes = share_prefixes(problems)
            self._reads = share_reads([each.stream for each in problems if isinstance(each.stream, Stream)])

    def leave(self, program: Program) -> None:
        """Let a program go that has ended."""
        if not any(each is program for each in self._programs):
            return
        self._programs = [each for each in self._programs if each is not program]
        for problem in program.problems.values():
            for prefix in self._prefixes:
                for part in problem.module.modules():
                    prefix.leave(part)
            if isinstance(problem.stream, Stream):
                for reads in self._reads:
                    reads.leave(problem.stream)

    def _end(self) -> None:
        for prefix in self._prefixes:
            prefix.close()
        for program in self._programs:
            for problem in program.problems.values():
                if isinstance(problem.stream, Stream):
                    for reads in self._reads:
                        reads.leave(problem.stream)
        self._prefixes, self._reads = [], []
