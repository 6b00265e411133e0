"""Waiting for a step's updates, and the errors that they found."""

from __future__ import annotations

from ..config import OffloadConfig
from ..errors import GradientError
from ..movement.executor import Executor
from ..schedule.ledger import Ledger

OTHER_RANK = "a part of another rank"


class UpdateWaiter:
    """A waiter for the updates of the last step."""

    def __init__(self, config: OffloadConfig, executor: Executor, ledger: Ledger) -> None:
        self._config, self._executor, self._ledger = config, executor, ledger

    def wait_for_updates(self) -> None:
        """Wait until the last step's updates are finished, and raise the errors that they found."""
        if self._executor.protocol.updates_pending:
            self._executor.protocol.finish_updates()
            # In the other cases the next step rolls back, or checks what all ranks have found.
            if self._config.on_nonfinite != "rollback" and self._ledger.over_ranks is None:
                self.raise_nonfinite()

    def raise_nonfinite(self) -> None:
        """Raise once if an update produced non-finite values, on this rank or on another one."""
        if self._ledger.any_nonfinite():
            units = self._executor.layout.units
            names = ", ".join(units[unit].name for unit in dict.fromkeys(self._ledger.nonfinite))
            self._ledger.nonfinite.clear()
            raise GradientError(
                f"the update produced non-finite values in {names or OTHER_RANK}; lower the "
                "learning rate, clip with max_grad_norm, or look for the first loss that is not "
                "finite"
            )
