"""How a job reports to its trial while it trains."""

import json
import math
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mlotool.sweep.storage import import_optuna, open_storage, storing
from mlotool.sweep.study_options import make_pruner
from mlotool.sweep.trials import is_copy


class Watcher:
    """Reports a job's objective to its trial, and asks whether to go on.

    Args:
        url: of the database.
        name: of the study.
        trial: its number.
        pruner: as in `sweep.pruner`.
        pruner_options: as in `sweep.pruner_options`.
    """

    def __init__(self, url: str, name: str, trial: int, pruner: str, pruner_options: Mapping[str, Any]) -> None:
        optuna, self._url = import_optuna(), url
        self._study = _study(url, name, pruner, json.dumps(dict(pruner_options), sort_keys=True))
        [own] = (other for other in self._study.get_trials(deepcopy=False) if other.number == trial)
        self._trial = optuna.trial.Trial(self._study, own._trial_id)

    def __call__(self, tick: int, value: float) -> bool:
        """Report; return whether the job is to end.

        NaN is no value: to a pruner it would be worse than every other one, whatever came before.
        """
        if math.isnan(value):
            return False
        with storing(self._url):
            with warnings.catch_warnings():
                # A trial that goes on from a checkpoint reports the ticks since then again.
                warnings.filterwarnings("ignore", message=".*reported value is ignored.*")
                self._trial.report(value, tick)
            return bool(self._trial.should_prune())


# The jobs of a process report to one study, whose database takes longer to open than to report to.
@lru_cache(maxsize=1)
def _study(url: str, name: str, pruner: str, pruner_options: str) -> Any:
    from optuna.study import Study

    class WithoutCopies(Study):
        """Shows a pruner the trials that have jobs: it counts them, and compares a job with each."""

        def get_trials(self, *args: Any, **kwargs: Any) -> list[Any]:
            return [each for each in super().get_trials(*args, **kwargs) if not is_copy(each)]

    return WithoutCopies(name, open_storage(url), pruner=make_pruner(pruner, json.loads(pruner_options)))
