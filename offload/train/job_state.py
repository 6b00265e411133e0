"""What a commit holds for the job to go on from it: the place in the run, and what the run is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .data import Corpus

FORMAT = 1


@dataclass
class Progress:
    """Where a run stands between two steps.

    Attributes:
        settings: what must stay as it is for the run to be the same, by name.
        step: steps done.
        position: batches taken by them.
        scaler: state of the loss scaler.
    """

    settings: Mapping[str, Any]
    step: int = 0
    position: int = 0
    scaler: Mapping[str, Any] = field(default_factory=dict)

    def as_extra(self) -> dict[str, Any]:
        """For ``wrap(extra=...)``."""
        return {
            "train": FORMAT, "settings": dict(self.settings), "step": self.step,
            "position": self.position, "scaler": dict(self.scaler),
        }  # fmt: skip

    def take(self, extra: Any) -> None:
        """Goes to where ``extra``, as a store gave it back, says.

        Raises:
            ValueError: another program made the store, or the job is not the one it was made by.
        """
        if not isinstance(extra, Mapping) or extra.get("train") != FORMAT:
            raise ValueError(
                "resume: the store was not made by overspill train; continue it with "
                "overspill.resume in the program that made it"
            )
        for name, kept in extra["settings"].items():
            if (mine := self.settings.get(name)) != kept:
                raise ValueError(
                    f"resume: the run was begun with {name} {kept}, not {mine}; give the same"
                )
        self.step, self.position = extra["step"], extra["position"]
        self.scaler = extra["scaler"]


def fingerprint(corpus: Corpus) -> str:
    """Tells one corpus from another."""
    tokens = np.ascontiguousarray(corpus.tokens)
    return f"{len(tokens)} tokens, CRC-32 {zlib.crc32(tokens.view(np.uint8).data):08x}"
