"""Rules for which rows of a table a step of a torch optimizer changes, by the optimizer's type and settings.

Some optimizers change only rows with a gradient. Others change more: moments keep moving a row that had a gradient
once, and weight decay moves every row. For these the set of dirty rows is widened to all rows that may have changed; it
is still exact, and costs more to stream. An unknown optimizer may change every row. Its states are not streamed: their
names are known only after its first step, when the server has the table without them.

A schedule may change the settings later.

One effect is missed: under `torch.set_flush_denormal(True)` an update by a dense gradient also turns denormal weights
of rows without a gradient into zeros.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor

__all__ = [
    "Dirty",
    "Reach",
    "Rule",
    "changed_rows",
    "group_of",
    "nonzero_rows",
    "owners_of",
    "rule_for_rows",
    "rule_of",
]

_Settings = Mapping[str, Any]

Dirty = Literal["lookups", "gradients", "all"]
"""Which rows a step changes, in the user's words: those that it looks up, those with a gradient, or all."""


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
    # Whether it is that of the optimizer's exact type.
    is_known: bool = True
    # Returns the scalars that the first step creates, where the constructor has not; its row states are zeros.
    first_scalars: Callable[[_Settings, torch.Tensor], dict[str, Any]] = lambda group, parameter: {}

    def scalars_in(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the scalars of a parameter's state so far; a plain number (SparseAdam's step) as int64."""
        return {
            name: local_tensor(value) if isinstance(value, torch.Tensor) else _scalar(value)
            for name in self.scalars
            if (value := state.get(name)) is not None
        }


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float32, device="cpu")


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule for an optimizer's exact type: a derived class may do anything.

    Raises:
        UnsupportedModelError: The type is unknown, and so are its states.
    """
    kind = type(optimizer)
    rule = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is None:
        raise UnsupportedModelError(f"the states of optimizer {kind.__name__} are not known")
    return rule


def rule_for_rows(optimizer: torch.optim.Optimizer, dirty: Dirty | None) -> Rule:
    """Return the rule for an optimizer of any type; of an unknown one by what the user says, or all rows.

    Raises:
        UnsupportedModelError: Hooks cannot see its steps, or the ranks' rows differ after them.
    """
    kind = type(optimizer)
    if not getattr(kind.step, "hooked", False):
        raise UnsupportedModelError(
            f"optimizer {kind.__name__} runs no step hooks, because it does not call torch.optim.Optimizer.__init__: "
            f"give the optimizer inside it"
        )
    if kind.__name__ == "PostLocalSGDOptimizer":
        raise UnsupportedModelError(
            f"optimizer {kind.__name__} keeps different rows on each rank between its averages: train under "
            f"DistributedDataParallel with the optimizer inside it"
        )
    known = _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    return known or _UNKNOWN[dirty or "all"]


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
    return (*_MOMENTS, ("max_exp_avg_sq", False)) if group["amsgrad"] else _MOMENTS


def _refuse_sgd(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    if is_sparse and group["momentum"] != 0:
        return f"momentum {group['momentum']} of a sparse gradient is not kept row by row: use sparse=False"
    return None


def _refuse_small_eps(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    # 0 / (sqrt(0) + 0) turns rows that never had a gradient into NaN; float16 rounds the usual 1e-8 or 1e-10 to 0.
    if not is_sparse and dtype.is_floating_point and not torch.tensor(group["eps"], dtype=dtype, device="cpu") > 0:
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


def _first_step_of_others(group: _Settings, parameter: torch.Tensor) -> dict[str, Any]:
    """Source: `_init_group` in `torch/optim/{rmsprop,radam}.py`, torch 2.13."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return {"step": torch.zeros((), dtype=dtype, device=parameter.device if group["capturable"] else "cpu")}


def _first_step_of_nadam(group: _Settings, parameter: torch.Tensor) -> dict[str, Any]:
    """Source: `_init_group` in `torch/optim/nadam.py`, torch 2.13."""
    step = _first_step_of_others(group, parameter)["step"]
    return {"step": step, "mu_product": torch.ones_like(step)}


def _rmsprop_states(group: _Settings) -> tuple[tuple[str, bool], ...]:
    names = ["square_avg"]
    if group["momentum"] > 0:
        names.append("momentum_buffer")
    if group["centered"]:
        names.append("grad_avg")
    return tuple((name, False) for name in names)


def _refuse_dense(group: _Settings, dtype: torch.dtype, is_sparse: bool) -> str | None:
    if not is_sparse:
        return 'a dense gradient does not say which rows were looked up: say dirty="gradients", or take sparse=True'
    return None


def _whole(states: Callable[[_Settings], tuple[tuple[str, bool], ...]], **rest: Any) -> Rule:
    """Return a rule by which a step may change every row."""
    return Rule(states=states, refuse=lambda *_: None, reach=lambda *_: Reach.ALL, **rest)


_MOMENTS = (("exp_avg", False), ("exp_avg_sq", False))
# By what the user says a step changes.
_UNKNOWN: dict[Dirty, Rule] = {
    "all": _whole(lambda _: (), is_known=False),
    "gradients": Rule(states=lambda _: (), refuse=lambda *_: None, reach=lambda *_: Reach.GRADIENT, is_known=False),
    "lookups": Rule(states=lambda _: (), refuse=_refuse_dense, reach=lambda *_: Reach.GRADIENT, is_known=False),
}
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
    "torch.optim.rmsprop.RMSprop": _whole(_rmsprop_states, scalars=("step",), first_scalars=_first_step_of_others),
    "torch.optim.nadam.NAdam": _whole(
        lambda _: _MOMENTS, scalars=("step", "mu_product"), first_scalars=_first_step_of_nadam
    ),
    "torch.optim.radam.RAdam": _whole(lambda _: _MOMENTS, scalars=("step",), first_scalars=_first_step_of_others),
    "torch.optim.sparse_adam.SparseAdam": Rule(
        states=lambda _: _MOMENTS,
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
            return torch.empty(0, dtype=torch.int64, device="cpu")
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
        return torch.empty(0, dtype=torch.int64, device="cpu")
    row_bytes = values.shape[1] * values.element_size()
    whole = values.detach().contiguous()
    # DistributedDataParallel's buckets pack gradients, so one may begin in the middle of a larger element.
    offset_bytes = whole.storage_offset() * whole.element_size()
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0 and offset_bytes % size == 0)
    is_changed = whole.view(_INT_OF_SIZE[size]).any(dim=1)
    if waits:
        return is_changed.nonzero().reshape(-1)
    return torch.where(is_changed, torch.arange(is_changed.numel(), device=is_changed.device, dtype=torch.int64), -1)
