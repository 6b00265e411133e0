"""What the optimizers for CPU tensors share: state in any format, and torch's state_dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .compact import Noise
from .formats import WEIGHT_DTYPES, Master, Moments, scale_name
from .joint import JointOptimizer
from .reference import load_moment, read_moment, read_weight, write_weight
from .rule import Rule
from .whole import flat

TensorDict = dict[str, Any]


def check_at_least_zero(**values: float | Tensor) -> None:
    """Raises ValueError unless every value is at least zero."""
    for name, value in values.items():
        if not float(value) >= 0.0:
            raise ValueError(f"{name} must be at least 0, not {value}")


def refuse_graph_options(**options: bool) -> None:
    """Raises ValueError for options that only make sense inside a graph."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}=True is not supported: the update runs outside of autograd")


class FlatOptimizer(torch.optim.Optimizer):
    """Base of the optimizers, which update parameters and state in place, once per step.

    ``state[p]`` holds the fields of the rule in their formats (moments shaped like the parameter)
    and ``step``.  ``state_dict`` returns torch's format: moments in fp32, plus ``master`` (fp32)
    for parameters that have one; loading such a state into compact moments rounds it again.

    With a master, the parameter follows the master: write to a parameter by hand only before its
    first step, or load a state afterwards.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], master: Master, moments: Moments
    ) -> None:
        self._master: Master = master
        self._moments: Moments = moments
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:  # torch's has what every optimizer has
        return super().__getstate__() | {"_master": self._master, "_moments": self._moments}

    @property
    def moments(self) -> Moments:
        """How moments are stored."""
        return self._moments

    def rule_of(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a parameter group, by its present options."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                self._check(param, group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, param: Tensor, group: Mapping[str, Any]) -> None:
        if param.device.type != "cpu" or param.layout is not torch.strided:
            raise ValueError(
                f"overspill.optim updates dense CPU tensors, not {param.layout} on "
                f"{param.device}; for a model on a device use overspill.wrap"
            )
        if param.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"parameters must be one of {WEIGHT_DTYPES}, not {param.dtype}")
        self.rule_of(group).state_fields(param.dtype, self._master_of(param), self._moments)

    def _master_of(self, param: Tensor) -> Master:
        return None if param.dtype is torch.float32 else self._master

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """One step.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: multiplies every gradient within the pass (``p.grad`` stays as it is).

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self.rule_of(group)
            scalars = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self._state_of(param, group, rule)
                state["step"] += 1
                step = int(state["step"])
                if step not in scalars:
                    scalars[step] = rule.scalars(group, step, grad_scale)
                rule.update(self._grad_of(param), flat(param), _flat_state(state), scalars[step])
        return loss

    def _grad_of(self, param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise RuntimeError(f"gradients must be dense, but one is {grad.layout}")
        if grad.stride() != param.stride() and not (grad.is_contiguous() and param.is_contiguous()):
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return flat(grad)

    def _state_of(self, param: Tensor, group: Mapping[str, Any], rule: Rule) -> TensorDict:
        state: TensorDict = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            self._add_master(param, state, None)
        for name in rule.moments:
            if name not in state:
                self._add_moment(param, state, rule, name, rule.initial(group).get(name, 0.0))
        return state

    def _add_master(self, param: Tensor, state: TensorDict, value: Tensor | None) -> None:
        """Adds the fields of the master: the parameter's own value, or ``value`` in fp32."""
        master = self._master_of(param)
        if master == "split":
            state["master_lo"] = torch.zeros_like(param, dtype=torch.int16)
        elif master == "fp32":
            state["master"] = param.detach().to(torch.float32, copy=True)
        if value is not None and master is not None:
            same_order = torch.empty_like(param, dtype=torch.float32).copy_(value)
            write_weight(flat(same_order), flat(param.detach()), _flat_state(state))

    def _add_moment(
        self, param: Tensor, state: TensorDict, rule: Rule, name: str, value: Tensor | float
    ) -> None:
        fields = rule.state_fields(param.dtype, self._master_of(param), self._moments)
        for field in fields:
            if field.name == name:
                state[name] = torch.zeros_like(param, dtype=field.dtype)
            elif field.name == scale_name(name):
                state[field.name] = torch.zeros(
                    field.elements(param.numel()), dtype=field.dtype, device=param.device
                )
        if isinstance(value, Tensor) or value != 0.0:
            start = torch.empty_like(param, dtype=torch.float32)
            start.copy_(value) if isinstance(value, Tensor) else start.fill_(value)
            noise = Noise(0, rule.moments.index(name), 0)
            load_moment(flat(start), _flat_state(state), name, noise)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's format: moments in fp32 in all cases, masters as ``master``."""
        result = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        indices = [index for group in result["param_groups"] for index in group["params"]]
        of_index = dict(zip(indices, params, strict=True))
        result["state"] = {
            index: self.torch_state(of_index[index]) for index, state in result["state"].items()
        }
        return result

    def torch_state(self, param: Tensor) -> TensorDict:
        """The state of one parameter in torch's format, with its ``master``; empty if it has none.

        fp32 tensors may be those of the state itself.
        """
        state: TensorDict = self.state.get(param, {})
        flattened = _flat_state(state)
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        result: TensorDict = {"step": state["step"]} if "step" in state else {}
        for name in self.rule_of(group).moments:
            if name in state and state[name].dtype is torch.float32:
                result[name] = state[name]
            elif name in state:
                result[name] = torch.empty_like(param, dtype=torch.float32)
                flat(result[name]).copy_(read_moment(flattened, name))
        if "master_lo" in state or "master" in state:
            result["master"] = torch.empty_like(param, dtype=torch.float32)
            flat(result["master"]).copy_(read_weight(flat(param.detach()), flattened))
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state in torch's format, of this class or of torch's optimizer of the same rule.

        The base class would cast moments to the parameter's dtype; here they keep fp32 until they
        are stored in the chosen format.
        """
        super().load_state_dict({**state_dict, "state": {}})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        for index, param, group in zip(saved, params, groups, strict=True):
            given = state_dict["state"].get(index)
            if given is not None:
                self._take(param, group, given)

    def _take(self, param: Tensor, group: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        rule = self.rule_of(group)
        known = {"step", "master", *rule.moments}
        extra = set(given) - known
        if extra:
            raise ValueError(f"the state has {sorted(extra)}, which {type(self).__name__} lacks")
        state: TensorDict = self.state[param]
        steps = float(rule.steps_taken(given))
        state["step"] = torch.tensor(steps, dtype=torch.float32, device="cpu")
        self._add_master(param, state, given.get("master"))
        for name in rule.moments:
            if given.get(name) is not None:
                self._add_moment(param, state, rule, name, given[name])


def _flat_state(state: TensorDict) -> dict[str, Tensor]:
    return {name: flat(tensor) for name, tensor in state.items() if name != "step"}


def torch_state(optimizer: torch.optim.Optimizer, param: Tensor) -> Mapping[str, Any]:
    """A parameter's state in torch's format, whether the optimizer is torch's or one of these."""
    if isinstance(optimizer, JointOptimizer):
        return torch_state(optimizer.owner[param], param)
    if isinstance(optimizer, FlatOptimizer):
        return optimizer.torch_state(param)
    state: Mapping[str, Any] = optimizer.state.get(param, {})
    return state


def moments_of(optimizer: torch.optim.Optimizer) -> Moments:
    """How an optimizer stores its moments; torch's own do in fp32 for fp32 parameters."""
    return optimizer.moments if isinstance(optimizer, FlatOptimizer) else "fp32"
