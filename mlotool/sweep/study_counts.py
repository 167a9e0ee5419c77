"""How many jobs of a study there are, and what became of them."""


class JobCounts:
    """Counts the jobs that a study has given, and its draws.

    Attributes:
        num_given: jobs that were given to be run, by this process or an earlier one that saw them end.
        num_ended: of these, how many have ended.
        num_interrupted: of these, how many were interrupted, and go on when the sweep does.
        num_known: draws of known points, which have no jobs.
        num_known_in_a_row: how many of them came one after the other, at last.
    """

    def __init__(self) -> None:
        self.num_given = self.num_ended = self.num_interrupted = 0
        self.num_known = self.num_known_in_a_row = 0

    @property
    def num_running(self) -> int:
        """Jobs that were given, and have neither ended nor been interrupted."""
        return self.num_given - self.num_ended - self.num_interrupted

    def give(self, num: int) -> None:
        """Count jobs that are to be run."""
        self.num_given += num

    def end(self, num: int = 1) -> None:
        """Count jobs that have ended, from which the sampler may learn to draw other points."""
        self.num_ended += num
        self.num_known_in_a_row = 0

    def interrupt(self) -> None:
        """Count a job that was interrupted."""
        self.num_interrupted += 1

    def draw_new(self) -> None:
        """Count a draw of a point that was not known."""
        self.num_known_in_a_row = 0

    def draw_known(self) -> None:
        """Count a draw of a known point."""
        self.num_known += 1
        self.num_known_in_a_row += 1
