"""The side of the optimizer suite that runs in DeepSpeed's own environment, without overspill.

``python optim_deepspeed.py NUMEL THREADS COEFFICIENT OPTIONS``: every line on stdin is one step of
DeepSpeedCPUAdam with the passes that bf16 training needs around it; the answer is a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Step:
    """bf16 gradients in, bf16 weights out, around an fp32 optimizer."""

    def __init__(self, numel: int, coefficient: float, options: dict[str, Any]) -> None:
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self._coefficient = coefficient
        self._grad = torch.randn(numel).bfloat16()
        self._weight = torch.zeros(numel, dtype=torch.bfloat16)
        self._param = torch.nn.Parameter(torch.randn(numel) * 0.02)
        self._param.grad = torch.zeros(numel)
        self._optimizer = DeepSpeedCPUAdam([self._param], adamw_mode=True, **options)

    def run(self) -> float:
        """Seconds of one step."""
        grad = self._param.grad
        assert grad is not None
        started = time.perf_counter()
        grad.copy_(self._grad)
        grad.mul_(self._coefficient)
        self._optimizer.step()
        self._weight.copy_(self._param.detach())
        return time.perf_counter() - started


def main() -> None:
    """Answers until stdin ends."""
    try:
        import deepspeed
        import torch

        torch.set_num_threads(int(sys.argv[2]))
        step = Step(int(sys.argv[1]), float(sys.argv[3]), json.loads(sys.argv[4]))
        tell({"deepspeed": deepspeed.__version__, "torch": torch.__version__})
        for _ in sys.stdin:
            tell({"seconds": step.run()})
    except Exception as error:  # the suite shows it as a row
        tell({"error": f"{type(error).__name__}: {error}"})


def tell(content: dict[str, Any]) -> None:
    """One line, at once."""
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
