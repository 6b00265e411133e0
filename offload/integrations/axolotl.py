"""A plugin for axolotl.  Add these lines to the configuration::

    plugins:
      - overspill.integrations.axolotl.OverspillPlugin
    overspill:
      device_memory: 10GiB
      host_memory: 48GiB
      nvme: /scratch/run1

The values under ``overspill`` are options of ``wrap``; see ``integrations.transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .transformers import offloaded


class OverspillArgs(BaseModel):
    """What the plugin adds to a configuration."""

    overspill: dict[str, Any] | None = None


class OverspillPlugin(BasePlugin):  # type: ignore[misc]
    """Trains with axolotl's own trainer over tiers of memory."""

    def get_input_args(self) -> str:
        """Where ``OverspillArgs`` is."""
        return f"{__name__}.{OverspillArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type:
        """axolotl's trainer, with the engine.

        Raises:
            ValueError: another trainer is asked for, which axolotl does not build from a plugin's
                class, or not with all that it needs.
        """
        others = ("rl", "reward_model", "process_reward_model", "trainer_cls")
        asked = [name for name in others if cfg.get(name)]
        if cfg.get("model_config_type") == "mamba":
            asked.append("model_config_type: mamba")
        if asked:
            raise ValueError(
                f"the overspill plugin does not go together with {', '.join(asked)}; use TRL's "
                "trainer in a script, by overspill.integrations.transformers.offloaded"
            )
        from axolotl.core.trainers import AxolotlTrainer

        return _with(AxolotlTrainer, dict(cfg.get("overspill") or {}))


def _with(trainer_class: type, options: Mapping[str, Any]) -> type:
    """The trainer over an engine with these options, built as it is itself."""
    base: Any = offloaded(trainer_class)

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        base.__init__(self, *args, overspill=options, **more)

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})
