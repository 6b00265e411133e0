"""The check that a model has the same parameters as when it was wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import OptimizerStateError
from ..private.module_private import own_parameters
from ..private.reentrancy import callers

_AGAIN = (
    "keep state = optimizer.state_dict(), call overspill.unwrap(model), change what is trained, "
    "wrap the model again with a new optimizer{elsewhere}, and call its load_state_dict(state)"
)
_FUNCTIONAL = "torch.nn.utils.stateless"  # the module that torch.func.functional_call is in
_ELSEWHERE = " (and another nvme=, since the store keeps the last commit)"


class ParamGroupCheck:
    """A check for changes to what is trained, which the engine would not follow."""

    def __init__(
        self, model: nn.Module, groups: Sequence[Mapping[str, Any]], *, in_place: bool = True,
        durable: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            in_place: whether parameters keep their places in the model.
            durable: whether the store remains after the engine is closed.
        """
        self._again = _AGAIN.format(elsewhere=_ELSEWHERE if durable else "")
        self._groups = groups
        self._members = self._present()
        mine = {number for group in self._members for number in group}
        self._frozen = [
            (name, p) for name, p in model.named_parameters()
            if id(p) in mine and not p.requires_grad
        ]  # fmt: skip
        self._places = [
            (f"{path}.{name}" if path else name, own_parameters(module), name, p)
            for path, module in (model.named_modules() if in_place else ())
            for name, p in own_parameters(module).items()
        ]

    def _present(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._groups]

    def check(self) -> None:
        """Check the parameters, before every forward that trains, and every step.

        Raises:
            OffloadError: a parameter that was frozen requires grad or has a gradient now, but it
                has no state; another one has taken a parameter's place in the model; or the groups
                have other members.
        """
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise OptimizerStateError(
                f"{_listed(thawed)} required no grad when the model was wrapped, so no room was "
                f"planned for its state; {self._again}"
            )
        given = [name for name, p in self._frozen if p.grad is not None]
        if given:
            raise OptimizerStateError(
                f"{_listed(given)} required no grad when the model was wrapped, and has a gradient "
                f"now, which would not be applied; set p.grad = None, or {self._again}"
            )
        replaced = [name for name, there, key, p in self._places if there.get(key) is not p]
        if replaced and any(f.f_globals.get("__name__") == _FUNCTIONAL for f in callers()):
            raise OptimizerStateError(
                "torch.func.functional_call replaces parameters while the model runs, which is not "
                "supported on a wrapped model; call overspill.unwrap(model) first"
            )
        if replaced:
            raise OptimizerStateError(
                f"{_listed(replaced)} was replaced, or moved elsewhere in the model, after it was "
                f"wrapped; put the old one back, or {self._again}"
            )
        if self._present() != self._members:
            raise OptimizerStateError(
                "the parameters in optimizer.param_groups have changed since wrap; put the old "
                f"lists back, or {self._again}"
            )


def _listed(names: Iterable[str]) -> str:
    first = list(dict.fromkeys(names))
    more = f" and {len(first) - 3} more" if len(first) > 3 else ""
    return f"{', '.join(first[:3])}{more}"
