"""The transportation problem: what each giver sends to each taker, at the least cost.

Successive shortest paths with potentials. Each phase finds the shortest paths from all givers that have something left,
by Bellman-Ford over the whole matrix in numpy, and then sends along every path that is tight. Where few speeds differ,
one or two phases do; 500 givers and 500 takers with costs at random take about a hundred.

No library is used: OR-tools and SciPy weigh 30 MB and more on a server, NetworkX takes minutes for 250,000 arcs, and
all costs are whole numbers here, so the answer is exact and the same everywhere.

Source: Ahuja, Magnanti, Orlin, "Network Flows", 1993, chapter 9.7.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "solve_transport"]

Ints = npt.NDArray[np.int64]
_FAR = np.int64(2**60)


def solve_transport(supply: Ints, demand: Ints, cost: Ints) -> Ints:
    """Return the flow of least cost, int64[givers, takers], ≥ 0.

    Args:
        supply: int64[givers], ≥ 0; what each gives.
        demand: int64[takers], ≥ 0, with the same sum.
        cost: int64[givers, takers], 0 to 2⁴⁰, a unit.
    """
    if int(supply.sum()) != int(demand.sum()):
        raise ValueError(f"supply {int(supply.sum())} and demand {int(demand.sum())} differ")
    left, missing = supply.copy(), demand.copy()
    flow = np.zeros_like(cost)
    while missing.any():
        paths = _shortest_paths(left, flow, cost)
        _send_directly(left, missing, flow, paths.to_giver[:, None] + cost == paths.to_taker)
        for taker in np.flatnonzero(missing).tolist():
            _send_along(taker, left, missing, flow, paths)
    return flow


class _Paths(NamedTuple):
    """Distances, int64, and the end of each shortest path: a giver is reached through a taker (-1: it is the start)."""

    to_giver: Ints
    to_taker: Ints
    through: Ints
    parent: Ints


def _shortest_paths(left: Ints, flow: Ints, cost: Ints) -> _Paths:
    """Return the shortest paths from all givers with something left."""
    givers, takers = np.arange(cost.shape[0]), np.arange(cost.shape[1])
    to_giver, to_taker = np.where(left > 0, np.int64(0), _FAR), np.full(len(takers), _FAR)
    through, parent = np.full(len(givers), -1), np.full(len(takers), -1)
    back = np.where(flow > 0, cost, -_FAR)  # flow may be taken back, for the cost that this saves
    while True:
        # An end is changed only where a path becomes shorter; among equal ones it could lead in a circle.
        reached = to_giver[:, None] + cost
        best = reached.argmin(axis=0)
        is_shorter = reached[best, takers] < to_taker
        to_taker[is_shorter], parent[is_shorter] = reached[best, takers][is_shorter], best[is_shorter]
        reached = to_taker - back
        best = reached.argmin(axis=1)
        is_shorter = reached[givers, best] < to_giver
        if not is_shorter.any():
            return _Paths(to_giver, to_taker, through, parent)
        to_giver[is_shorter], through[is_shorter] = reached[givers, best][is_shorter], best[is_shorter]


def _send_directly(left: Ints, missing: Ints, flow: Ints, tight: npt.NDArray[np.bool_]) -> None:
    """Send what givers have left over tight arcs, in the order of the indices."""
    for giver in np.flatnonzero(left).tolist():
        for taker in np.flatnonzero(tight[giver] & (missing > 0)).tolist():
            amount = min(left[giver], missing[taker])
            flow[giver, taker] += amount
            left[giver] -= amount
            missing[taker] -= amount
            if not left[giver]:
                break


def _send_along(taker: int, left: Ints, missing: Ints, flow: Ints, paths: _Paths) -> None:
    """Send as much as its shortest path carries to one taker; nothing, where earlier paths have used it up."""
    at = int(paths.parent[taker])
    arcs = [(at, taker)]
    while not left[at] and paths.through[at] >= 0:
        via = int(paths.through[at])
        arcs.append((at, via))
        at = int(paths.parent[via])
        arcs.append((at, via))
    amount = min(int(left[at]), int(missing[taker]), *(int(flow[arc]) for arc in arcs[1::2]))
    for hop, arc in enumerate(arcs):
        flow[arc] += amount if hop % 2 == 0 else -amount
    left[at] -= amount
    missing[taker] -= amount
