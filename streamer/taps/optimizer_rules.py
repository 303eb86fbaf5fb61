"""Which rows of a table a step of a torch optimizer changes, under which settings.

Some optimizers change only the rows that have a gradient. Others change more: moments go on moving a row that had a
gradient once, and weight decay moves every row. Then the set of dirty rows is widened to what may have changed; it is
exact all the same, and costs more to stream. What is not known, or cannot be read row by row, is refused.

The reach depends on the optimizer's type and on its settings, which a schedule may change later.

One thing is not seen: under `torch.set_flush_denormal(True)` an update by a dense gradient also turns denormal weights
of rows without a gradient into zeros.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.schemas.errors import UnsupportedModelError

__all__ = ["Reach", "Rule", "rule_of"]

_Settings = Mapping[str, Any]


class Reach(enum.Enum):
    """Which rows a step may change."""

    GRADIENT = "rows with a gradient"
    TOUCHED = "every row that has ever had a gradient"
    ALL = "every row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one type of optimizer treats the rows of a table.

    Attributes:
        states: Given a param group, the row states by name, and whether each is rowwise (`[rows, 1]`) or as wide as the
            weights. The optimizer's own step count is one number for the whole table: `scalars`.
        refuse: Given a param group, the table's element type and whether its gradient is sparse, says why the table
            cannot be streamed; None when it can.
        reach: Given the same, tells which rows a step may change.
        scalars: Names of states that are one number for the whole table.
    """

    states: Callable[[_Settings], tuple[tuple[str, bool], ...]]
    refuse: Callable[[_Settings, torch.dtype, bool], str | None]
    reach: Callable[[_Settings, torch.dtype, bool], Reach]
    scalars: tuple[str, ...] = ()


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of an optimizer, by its exact type: a derived class may do anything.

    Raises:
        UnsupportedModelError: It is not known which rows it changes.
    """
    kind = type(optimizer)
    rule = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is not None:
        return rule
    raise UnsupportedModelError(
        f"optimizer {kind.__name__} cannot be streamed exactly: it is not known which rows its step changes; use SGD, "
        f"Adagrad, Adam, AdamW, SparseAdam, RowWiseAdagrad, or a fused optimizer of FBGEMM or TorchRec for the tables"
    )


def _sgd_states(group: _Settings) -> tuple[tuple[str, bool], ...]:
    return (("momentum_buffer", False),) if group["momentum"] != 0 else ()


def _adam_states(group: _Settings) -> tuple[tuple[str, bool], ...]:
    moments = (("exp_avg", False), ("exp_avg_sq", False))
    return (*moments, ("max_exp_avg_sq", False)) if group["amsgrad"] else moments


def _refuse_sgd(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    if is_sparse and group["momentum"] != 0:
        return f"momentum {group['momentum']} of a sparse gradient is not kept row by row: use sparse=False"
    return None


def _refuse_small_eps(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    # 0 / (sqrt(0) + 0) would make rows NaN that never had a gradient; float16 rounds the usual 1e-8 or 1e-10 to 0.
    if not is_sparse and not torch.tensor(group["eps"], dtype=dtype) > 0:
        return (
            f"eps {group['eps']} is 0 in {str(dtype).removeprefix('torch.')}, so rows without a gradient become NaN: "
            f"take a larger one, or sparse=True"
        )
    return None


def _refuse_nothing(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    return None


def _reach_of_gradient(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    return Reach.GRADIENT


def _reach_without_moments(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    if group["weight_decay"] != 0 or _moves_zeros(group, is_sparse):
        return Reach.ALL
    return Reach.GRADIENT


def _reach_with_moments(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    # A moment of 0 stays 0 without a gradient, and moves nothing.
    if group["weight_decay"] != 0 or _moves_zeros(group, is_sparse):
        return Reach.ALL
    return Reach.TOUCHED


def _reach_of_sgd(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    has_moment = group["momentum"] != 0
    # Torch 2.13's fused kernel for the CPU writes moments of half precision into rows beside theirs.
    if has_moment and group.get("fused") and dtype in (torch.float16, torch.bfloat16):
        return Reach.ALL
    return (_reach_with_moments if has_moment else _reach_without_moments)(group, dtype, is_sparse)


def _moves_zeros(group: _Settings, is_sparse: bool) -> bool:
    """Return whether a gradient of 0 changes a row."""
    # Negated zeros turn -0.0 into 0.0, and a rate that is inf or NaN makes NaN of them. Of a tensor it is not asked: on
    # a GPU that would wait.
    rate = group["lr"]
    is_finite = not isinstance(rate, float) or math.isfinite(rate)
    return not is_sparse and (bool(group.get("maximize")) or not is_finite)


_ADAM = Rule(states=_adam_states, refuse=_refuse_small_eps, reach=_reach_with_moments, scalars=("step",))
_RULES = {
    "torch.optim.sgd.SGD": Rule(states=_sgd_states, refuse=_refuse_sgd, reach=_reach_of_sgd),
    "torch.optim.adagrad.Adagrad": Rule(
        states=lambda _: (("sum", False),), refuse=_refuse_small_eps, reach=_reach_without_moments, scalars=("step",)
    ),
    "torch.optim.adam.Adam": _ADAM,
    "torch.optim.adamw.AdamW": _ADAM,
    "torch.optim.sparse_adam.SparseAdam": Rule(
        states=lambda _: (("exp_avg", False), ("exp_avg_sq", False)),
        refuse=_refuse_nothing,
        reach=_reach_of_gradient,
        scalars=("step",),
    ),
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": Rule(
        states=lambda _: (("sum", True),), refuse=_refuse_small_eps, reach=_reach_without_moments, scalars=("step",)
    ),
}
