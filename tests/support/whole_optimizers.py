"""Optimizers of no known type, which change more rows than have a gradient, in ways that torch may not count."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Around", "Decaying", "Lion"]


class Lion(torch.optim.Optimizer):
    """Moves by the signs of a momentum, and decays all rows, also those of tables without a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)  # torch does not count this
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad.to_dense(), 0.1)
                    parameter.add_(average.sign(), alpha=-group["lr"])


class Decaying(torch.optim.Adagrad):
    """Adagrad that changes rows after the step that it is derived from."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.optim.Adagrad.step(self, closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data[::7] *= 0.5


class Around(torch.optim.Optimizer):
    """Steps an optimizer inside, and pulls every fifth row back to where it was."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(params, lr=lr)
        self.slow = [each.detach().clone() for each in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for slow, parameter in zip(self.slow, self.inner.param_groups[0]["params"], strict=True):
            parameter[::5] = slow[::5]
            slow.lerp_(parameter, 0.5)
