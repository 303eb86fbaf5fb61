"""Which torch optimizers change no row but those that have a gradient, under which settings.

A table can be streamed exactly when the rows with a gradient are the only ones that a step changes. That depends on
the optimizer's type and on its settings, which a schedule may change later. An optimizer that changes other rows too
is refused here; streaming it means a wider set of dirty rows, and a `Rule` is where that would be said.

One thing is not seen: under `torch.set_flush_denormal(True)` an update by a dense gradient also turns denormal weights
of rows without a gradient into zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.schemas.errors import UnsupportedModelError

__all__ = ["Rule", "rule_of"]

_Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one type of optimizer treats the rows of a table.

    Attributes:
        states: Row states by name, and whether each is rowwise (`[rows, 1]`) or as wide as the weights. The
            optimizer's own step count is one number for the whole table and is not streamed.
        refuse: Given a param group, the table's element type and whether its gradient is sparse, says why rows without
            a gradient may change; None when they do not.
    """

    states: tuple[tuple[str, bool], ...]
    refuse: Callable[[_Settings, torch.dtype, bool], str | None]


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of an optimizer, by its exact type: a derived class may do anything.

    Raises:
        UnsupportedModelError: It changes rows that have no gradient, or is not known.
    """
    kind = type(optimizer)
    rule = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is not None:
        return rule
    if kind.__module__.startswith("torch.optim."):
        why = "it changes rows that have no gradient in a step (moments decay, or all rows are rescaled)"
    else:
        why = "it is not known which rows its step changes"
    raise UnsupportedModelError(f"optimizer {kind.__name__} cannot be streamed exactly: {why}; {_INSTEAD}")


_INSTEAD = (
    "use SGD without momentum and weight decay, Adagrad without weight decay, RowWiseAdagrad, "
    "SparseAdam with sparse=True, or a fused optimizer of FBGEMM or TorchRec for the tables"
)


def _refuse_sgd(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    if group["momentum"] != 0:
        return f"momentum {group['momentum']} moves rows that have no gradient"
    return _refuse_decay(group) or _refuse_maximize(group, is_sparse)


def _refuse_adagrad(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    # 0 / (sqrt(0) + 0) would make rows NaN that never had a gradient; float16 rounds the usual 1e-10 to 0.
    if not is_sparse and not torch.tensor(group["eps"], dtype=dtype) > 0:
        return (
            f"eps {group['eps']} is 0 in {str(dtype).removeprefix('torch.')}, so rows without a gradient become NaN: "
            f"take a larger one, or sparse=True"
        )
    return _refuse_decay(group) or _refuse_maximize(group, is_sparse)


def _refuse_sparse_adam(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    return None  # takes sparse gradients only, and touches only their rows


def _refuse_decay(group: _Settings) -> str | None:
    if group["weight_decay"] != 0:
        return f"weight_decay {group['weight_decay']} moves rows that have no gradient"
    return None


def _refuse_maximize(group: _Settings, is_sparse: bool) -> str | None:
    if group.get("maximize") and not is_sparse:
        return "maximize=True turns -0.0 into 0.0 in rows that have no gradient; use sparse=True"
    return None


_RULES = {
    "torch.optim.sgd.SGD": Rule(states=(), refuse=_refuse_sgd),
    "torch.optim.adagrad.Adagrad": Rule(states=(("sum", False),), refuse=_refuse_adagrad),
    "torch.optim.sparse_adam.SparseAdam": Rule(
        states=(("exp_avg", False), ("exp_avg_sq", False)), refuse=_refuse_sparse_adam
    ),
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": Rule(states=(("sum", True),), refuse=_refuse_adagrad),
}
