"""The end of a step's updates, and what they have found."""

from __future__ import annotations

from ..config import OffloadConfig
from ..movement.executor import Executor
from ..movement.updates import Updater


class Landing:
    """Waits for the last step."""

    def __init__(self, config: OffloadConfig, executor: Executor, updater: Updater) -> None:
        self._config, self._protocol, self._updater = config, executor.protocol, updater

    def land(self) -> None:
        """Waits until the last step's updates are over; raises what they found."""
        if self._protocol.landing:
            self._protocol.land()
            if self._config.on_nonfinite != "rollback":  # else the next step goes back
                self._updater.raise_nonfinite()
