"""The side of the optimizer suite that runs in DeepSpeed's own environment, without overspill.

Every order but the first is one step of DeepSpeedCPUAdam with the passes that bf16 training needs
around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .serving import serve


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


def begin(order: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Makes the optimizer for ``order["numel"]`` parameters."""
    import deepspeed
    import torch

    torch.set_num_threads(order["threads"])
    step = Step(order["numel"], order["coefficient"], order["options"])
    facts = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    return facts, lambda _: {"seconds": step.run()}


if __name__ == "__main__":
    serve(begin)
