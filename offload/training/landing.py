"""The end of a step's updates, and what they have found."""

from __future__ import annotations

from ..config import OffloadConfig
from ..errors import OffloadError
from ..movement.executor import Executor
from ..schedule.ledger import Ledger


class Landing:
    """Waits for the last step."""

    def __init__(self, config: OffloadConfig, executor: Executor, ledger: Ledger) -> None:
        self._config, self._executor, self._ledger = config, executor, ledger

    def land(self) -> None:
        """Waits until the last step's updates are over; raises what they found."""
        if self._executor.protocol.landing:
            self._executor.protocol.land()
            if self._config.on_nonfinite != "rollback":  # else the next step goes back
                self.raise_nonfinite()

    def raise_nonfinite(self) -> None:
        """Raises, once, when an update gave values that are not finite."""
        if self._ledger.nonfinite:
            units = self._executor.layout.units
            names = ", ".join(units[unit].name for unit in dict.fromkeys(self._ledger.nonfinite))
            self._ledger.nonfinite.clear()
            raise OffloadError(
                f"the update gave values that are not finite in {names}; lower the learning rate, "
                "clip with max_grad_norm, or look for the first loss that is not finite"
            )
