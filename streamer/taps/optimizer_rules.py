"""Rules for which rows of a table a step of a torch optimizer changes, by the optimizer's type and settings.

Some optimizers change only rows with a gradient. Others change more: moments keep moving a row that had a gradient
once, and weight decay moves every row. For these the set of dirty rows is widened to all rows that may have changed; it
is still exact, and costs more to stream. Unknown optimizers, and states that cannot be read row by row, are refused.

A schedule may change the settings later.

One effect is missed: under `torch.set_flush_denormal(True)` an update by a dense gradient also turns denormal weights
of rows without a gradient into zeros.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor

__all__ = ["Reach", "Rule", "changed_rows", "group_of", "nonzero_rows", "owners_of", "rule_of"]

_Settings = Mapping[str, Any]


class Reach(enum.Enum):
    """Which rows a step may change."""

    GRADIENT = "rows with a gradient"
    TOUCHED = "every row that has ever had a gradient"
    ALL = "every row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one type of optimizer treats a table, by param group, dtype, and whether the gradient is sparse."""

    # Names of the row states, and whether each is rowwise (`[rows, 1]`) or as wide as the weights.
    states: Callable[[_Settings], tuple[tuple[str, bool], ...]]
    # Returns why the table cannot be streamed, or None.
    refuse: Callable[[_Settings, torch.dtype, bool], str | None]
    # Returns which rows a step may change.
    reach: Callable[[_Settings, torch.dtype, bool], Reach]
    # States with one value per table, such as the step count.
    scalars: tuple[str, ...] = ()
    # Returns the scalars that the first step creates, where the constructor has not; its row states are zeros.
    first_scalars: Callable[[_Settings, torch.Tensor], dict[str, Any]] = lambda group, parameter: {}

    def scalars_in(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the scalars of a parameter's state so far; a plain number (SparseAdam's step) as int64."""
        return {
            name: local_tensor(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
            for name in self.scalars
            if (value := state.get(name)) is not None
        }


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule for an optimizer's exact type, or refuse it: a derived class may do anything."""
    kind = type(optimizer)
    rule = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is not None:
        return rule
    raise UnsupportedModelError(
        f"optimizer {kind.__name__} cannot be streamed exactly: it is not known which rows its step changes; use SGD, "
        f"Adagrad, Adam, AdamW, SparseAdam, RowWiseAdagrad, or a fused optimizer of FBGEMM or TorchRec for the tables"
    )


def group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any] | None:
    """Return an optimizer's present settings for a parameter; None if it does not have it."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return next((group for group in groups if any(each is parameter for each in group["params"])), None)


def owners_of(
    parameter: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return which of some optimizers, and of those applied in `backward()`, have a parameter, with their settings."""
    in_backward: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    settings = [(optimizer, group_of(optimizer, parameter)) for optimizer in [*optimizers, *in_backward]]
    return [(optimizer, group) for optimizer, group in settings if group is not None]


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
    # 0 / (sqrt(0) + 0) turns rows that never had a gradient into NaN; float16 rounds the usual 1e-8 or 1e-10 to 0.
    if not is_sparse and not torch.tensor(group["eps"], dtype=dtype) > 0:
        return (
            f"eps {group['eps']} is 0 in {str(dtype).removeprefix('torch.')}, so rows without a gradient become NaN: "
            f"take a larger one, or sparse=True"
        )
    return None


def _reach_without_moments(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    return Reach.ALL if group["weight_decay"] != 0 or _moves_zeros(group, is_sparse) else Reach.GRADIENT


def _reach_with_moments(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    # A moment of 0 stays 0 without a gradient, and moves nothing.
    is_all = _reach_without_moments(group, dtype, is_sparse) is Reach.ALL
    return Reach.ALL if is_all else Reach.TOUCHED


def _reach_of_sgd(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> Reach:
    if group["momentum"] == 0:
        return _reach_without_moments(group, dtype, is_sparse)
    # Torch 2.13's fused CPU kernel writes half-precision moments into neighboring rows.
    if group.get("fused") and dtype in (torch.float16, torch.bfloat16):
        return Reach.ALL
    return _reach_with_moments(group, dtype, is_sparse)


def _moves_zeros(group: _Settings, is_sparse: bool) -> bool:
    """Return whether a gradient of 0 changes a row."""
    # Negated zeros turn -0.0 into 0.0, and a rate of inf or NaN turns them into NaN. A rate in a tensor is not checked:
    # reading it from a GPU would wait.
    rate = group["lr"]
    is_finite = not isinstance(rate, float) or math.isfinite(rate)
    return not is_sparse and (bool(group.get("maximize")) or not is_finite)


def _first_step_of_adam(group: _Settings, parameter: torch.Tensor) -> dict[str, Any]:
    """Source: `_init_group` in `torch/optim/adam.py`, torch 2.13."""
    is_double = not group["fused"] and torch.get_default_dtype() == torch.float64
    device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
    return {"step": torch.zeros((), dtype=torch.float64 if is_double else torch.float32, device=device)}


_ADAM = Rule(
    states=_adam_states,
    refuse=_refuse_small_eps,
    reach=_reach_with_moments,
    scalars=("step",),
    first_scalars=_first_step_of_adam,
)
_RULES = {
    "torch.optim.sgd.SGD": Rule(states=_sgd_states, refuse=_refuse_sgd, reach=_reach_of_sgd),
    "torch.optim.adagrad.Adagrad": Rule(
        states=lambda _: (("sum", False),), refuse=_refuse_small_eps, reach=_reach_without_moments, scalars=("step",)
    ),
    "torch.optim.adam.Adam": _ADAM,
    "torch.optim.adamw.AdamW": _ADAM,
    "torch.optim.sparse_adam.SparseAdam": Rule(
        states=lambda _: (("exp_avg", False), ("exp_avg_sq", False)),
        refuse=lambda group, dtype, is_sparse: None,
        reach=lambda group, dtype, is_sparse: Reach.GRADIENT,
        scalars=("step",),
        first_scalars=lambda group, parameter: {"step": 0},
    ),
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": Rule(
        states=lambda _: (("sum", True),), refuse=_refuse_small_eps, reach=_reach_without_moments, scalars=("step",)
    ),
}


_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_rows(gradient: torch.Tensor, parameter: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Return the local ids, int64, of the rows with a gradient (also sparse, or a DTensor); see `nonzero_rows`."""
    if gradient.is_sparse:
        if not gradient._nnz():  # a numpy view of the empty indices would keep the next backward from growing them
            return torch.empty(0, dtype=torch.int64)
        return gradient._indices()[0]  # a gradient may be sparse by its columns too
    if is_dtensor(gradient):
        # A collective, but every rank is here: the optimizer's step has just redistributed it too.
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return nonzero_rows(local_tensor(gradient), waits=waits)


def nonzero_rows(values: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Return the ids, int64, of the rows that are not all +0.0, bit for bit.

    NaN counts, and so does -0.0, because subtracting it turns a weight of -0.0 into 0.0.

    Args:
        values: `[rows, dim]`, a gradient or a state.
        waits: Wait for the device, to return only these ids. If False, return one id per row, -1 for all +0.0.
    """
    if not values.numel():
        return torch.empty(0, dtype=torch.int64)
    row_bytes = values.shape[1] * values.element_size()
    whole = values.detach().contiguous()
    # DistributedDataParallel's buckets pack gradients, so one may begin in the middle of a larger element.
    offset_bytes = whole.storage_offset() * whole.element_size()
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0 and offset_bytes % size == 0)
    is_changed = whole.view(_INT_OF_SIZE[size]).any(dim=1)
    if waits:
        return is_changed.nonzero().reshape(-1)
    return torch.where(is_changed, torch.arange(is_changed.numel(), device=is_changed.device), -1)
