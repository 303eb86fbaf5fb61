"""Which shard shall own each partition: evenly loaded, within all caps, with as few bytes moved as that takes.

1. How much each shard must give or take at least, so that all lie within the tolerance (`Band`).
2. Partitions whose home is a taker go there. A partition's home is `shards[p mod len(shards)]`, its owner in a new
   server; so a server that grew and shrinks again gets its old map back, where links do not differ.
3. The rest is a transportation problem between givers and takers, with seconds a byte as cost, and each giver chooses
   the partitions that make up its flows.
4. Local search: partitions are whole and have caps that the flow does not know, so moves and swaps that lessen what is
   out of bounds follow, and then moves that nothing needs are undone.

No clock, hash or random number decides anything; ties go to the lowest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from headrace.paramserver.reshard.inventory import FOLLOWABLE, Cluster, Floats, Goal, Loads, sum_floats
from headrace.paramserver.reshard.transport import Ints, solve_transport
from headrace.schemas.errors import RequestError

__all__ = ["Band", "least_bytes", "place"]

_MICRO = 1e6  # updates a second are counted in millionths
_HARD = 1000.0  # a cap counts so much more than the balance
_EPSILON = 1e-9
_PASSES = 8
_PARTNERS = 12
_SWAPPED = 32


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """The balanced quantity, and what each shard may hold of it at the end.

    Attributes:
        weight: int64[partitions].
        low: int64[shards].
        high: int64[shards].
    """

    weight: Ints
    low: Ints
    high: Ints

    @classmethod
    def of(cls, cluster: Cluster, loads: Loads, goal: Goal) -> Band:
        """Return the bounds: the mean of the goal's shards ± its tolerance, or ± a mean partition if that is more."""
        by_name = {"bytes": loads.size_bytes, "rows": loads.num_rows, "updates": np.rint(loads.updates_s * _MICRO)}
        weight = by_name[goal.balance].astype(np.int64)
        total, shards = int(weight.sum()), np.array(goal.shards)
        mean = total / len(shards)
        slack = max(mean * goal.tolerance, -(-total // len(weight)))
        low, high = np.zeros(len(cluster.shards), np.int64), np.zeros(len(cluster.shards), np.int64)
        high[shards] = np.floor(mean + slack).astype(np.int64)
        if goal.evens_out:
            low[shards] = np.ceil(max(mean - slack, 0)).astype(np.int64)
        else:
            high[shards] = np.maximum(high, _sums(loads.owner, weight, len(low)))[shards]
        return cls(weight, low, high)


def least_bytes(loads: Loads, band: Band) -> int:
    """Return a lower bound of the bytes that any plan into the band must move: as if partitions could be cut."""
    held = _sums(loads.owner, band.weight, len(band.low))
    given = 0.0
    for shard in np.flatnonzero(held > band.high).tolist():
        given += _cheapest(loads, band, loads.owner == shard, int(held[shard] - band.high[shard]))
    lacks = np.maximum(band.low - held, 0)
    taken = _cheapest(loads, band, lacks[loads.owner] == 0, int(lacks.sum()))
    return int(np.ceil(max(given, taken) - _EPSILON))


def place(cluster: Cluster, loads: Loads, goal: Goal, band: Band) -> Ints:
    """Return each partition's owner, int64[partitions].

    Raises:
        RequestError: No placement keeps the caps, or none was found; the message says which and by how much.
    """
    gauges = _gauges(cluster, loads, goal, band)
    _refuse_impossible(gauges, goal)
    search = _Search(cluster, loads, goal, gauges, _flow_placement(cluster, loads, goal, band))
    search.mend()
    search.undo_needless()
    search.refuse_beyond_caps()
    return search.owner


def _sums(group: Ints, weight: npt.NDArray[np.int64], num_groups: int) -> Ints:
    """Return each group's sum, int64[groups]; `np.bincount` would round in float64."""
    sums = np.zeros(num_groups, np.int64)
    np.add.at(sums, group, weight)
    return sums


def _cheapest(loads: Loads, band: Band, is_there: npt.NDArray[np.bool_], amount: int) -> float:
    """Return the least bytes of the partitions there that hold an amount of the balanced quantity, cut where needed."""
    where = np.flatnonzero(is_there & (band.weight > 0))
    where = where[np.argsort(loads.size_bytes[where] / band.weight[where], kind="stable")]
    before = np.cumsum(band.weight[where]) - band.weight[where]
    share = np.clip((amount - before) / band.weight[where], 0, 1)
    return float((share * loads.size_bytes[where]).sum())


def _fill(held: Ints, amount: int) -> Ints:
    """Return what each gets when an amount is poured in, the lowest first, as water is."""
    order = np.argsort(held, kind="stable")
    low = held[order]
    sums = np.cumsum(low)
    room_below = low * np.arange(len(low)) - (sums - low)
    num_wet = int(np.searchsorted(room_below, amount, side="right"))
    level, rest = divmod(amount + int(sums[num_wet - 1]), num_wet)
    poured = np.zeros_like(held)
    poured[order[:num_wet]] = level - low[:num_wet]
    poured[order[:rest]] += 1
    return poured


def _surplus_and_need(held: Ints, band: Band, shards: Ints) -> tuple[Ints, Ints]:
    """Return what each shard gives and takes, int64[shards] each, with equal sums: the least that reaches the band."""
    give, take = np.maximum(held - band.high, 0), np.maximum(band.low - held, 0)
    spare = int(give.sum() - take.sum())
    if spare > 0:
        take[shards] = _fill(held[shards], int(give.sum()))
    elif spare < 0:
        of_others = int(give.sum() - give[shards].sum())
        give[shards] = _fill(-held[shards], int(take.sum()) - of_others)
    return give, take


def _way_costs(cluster: Cluster) -> Ints:
    """Return int64[nodes, nodes]: time a byte from node to node, in thousandths of that of the fastest way."""
    speed = cluster.bytes_s()
    return np.asarray(np.minimum(np.rint(1000 * speed.max() / speed), 2.0**40), np.int64)


def _flow_placement(cluster: Cluster, loads: Loads, goal: Goal, band: Band) -> Ints:
    """Return owners that reach the band but for what whole partitions leave over."""
    shards, costs, node = np.array(goal.shards), _way_costs(cluster), cluster.node_of_shard
    owner = _send_home(loads, goal, band, costs[np.ix_(node, node)])
    held = _sums(owner, band.weight, len(band.low))
    give, take = _surplus_and_need(held, band, shards)
    givers, takers = np.flatnonzero(give), np.flatnonzero(take)
    flow = solve_transport(give[givers], take[takers], costs[np.ix_(node[givers], node[takers])])
    density = loads.size_bytes / np.maximum(band.weight, 1)
    is_kept = np.isin(np.arange(len(band.low)), shards)
    order = np.lexsort((np.arange(len(owner)), -band.weight, density))
    for giver, row in zip(givers.tolist(), flow, strict=True):
        wants = dict(zip(takers.tolist(), row.tolist(), strict=True))
        wants = {taker: want for taker, want in wants.items() if want}
        for part in order[owner[order] == giver].tolist():
            taker = max(wants, key=lambda each: (wants[each], -each))
            if not is_kept[giver] or 0 < band.weight[part] <= wants[taker]:
                owner[part] = taker
                wants[taker] -= int(band.weight[part])
    # A shard that must be empty may still own partitions without load.
    owner[~is_kept[owner]] = shards[0]
    return owner


def _send_home(loads: Loads, goal: Goal, band: Band, costs: Ints) -> Ints:
    """Return owners after all moves home that some best plan makes: none raises the bytes that must move in all."""
    shards, owner = np.array(goal.shards), loads.owner.copy()
    held = _sums(owner, band.weight, len(band.low))
    spare = int(np.maximum(held - band.high, 0).sum() - np.maximum(band.low - held, 0).sum())
    home = shards[np.arange(len(owner)) % len(shards)]
    is_near = costs[np.arange(len(band.low)), :][:, shards].min(axis=1)
    # Where bytes are not what is evened out, those that need not leave are chosen by their bytes.
    may_choose = ~np.isin(owner, shards) | (goal.balance == "bytes")
    for part in np.flatnonzero((home != owner) & (band.weight > 0) & may_choose).tolist():
        source, to, weight = int(owner[part]), int(home[part]), int(band.weight[part])
        # What a giver need not give, or a taker need not take, is taken from the difference of the sums.
        unforced = weight - min(weight, max(int(held[source] - band.high[source]), 0))
        unneeded = weight - min(weight, max(int(band.low[to] - held[to]), 0))
        fits = held[source] - weight >= band.low[source] and held[to] + weight <= band.high[to]
        if fits and unforced <= max(-spare, 0) and unneeded <= max(spare, 0) and costs[source, to] <= is_near[source]:
            owner[part] = to
            held[source] -= weight
            held[to] += weight
            spare += unforced - unneeded
    return owner


@dataclass(slots=True, eq=False)
class _Gauge:
    """One quantity that shards, nodes or racks hold, with bounds.

    Attributes:
        what: The quantity, of a message.
        kind: Of the groups: shard, node or rack.
        names: Of the groups.
        group: int64[shards], each shard's.
        weight: float64[partitions].
        low: float64[groups].
        high: float64[groups].
        held: float64[groups], now.
        factor: Of what is out of bounds, in the search's sum.
    """

    what: str
    kind: str
    names: list[str]
    group: Ints
    weight: Floats
    low: Floats
    high: Floats
    held: Floats
    factor: float

    @property
    def all(self) -> Ints:
        """Every group, int64[groups]."""
        return np.arange(len(self.held))

    def excess(self, held: Floats, group: Ints) -> Floats:
        """Return how far amounts are out of their groups' bounds."""
        above = np.maximum(held - self.high[group], 0) + np.maximum(self.low[group] - held, 0)
        return np.asarray(above * self.factor, np.float64)


def _gauges(cluster: Cluster, loads: Loads, goal: Goal, band: Band) -> list[_Gauge]:
    """Return the balance, and each cap that there is."""
    by_shard, node = np.arange(len(cluster.shards)), cluster.node_of_shard
    names = [str(shard) for shard in by_shard.tolist()]
    size = loads.size_bytes.astype(np.float64)
    used = sum_floats(node[loads.owner], size, len(cluster.nodes))
    racks = sorted({each.rack for each in cluster.nodes})
    rack = np.array([racks.index(each.rack) for each in cluster.nodes])[node]
    updates = np.array([min(shard.max_updates_s, cluster.apply_rows_s * FOLLOWABLE) for shard in cluster.shards])
    memory = np.array([shard.max_memory_bytes for shard in cluster.shards], np.float64)
    disk = used + np.array([each.free_bytes for each in cluster.nodes])
    share = np.full(len(racks), cluster.max_rack_share * size.sum() if cluster.max_rack_share < 1 else inf)
    hard = [
        ("updates a second", "shard", names, by_shard, loads.updates_s, updates),
        (
            "bytes in memory",
            "shard",
            names,
            by_shard,
            loads.num_rows.astype(np.float64) * cluster.memory_bytes_per_row,
            memory,
        ),
        ("bytes on disk", "node", [each.name for each in cluster.nodes], node, size, disk),
        ("bytes", "rack", racks, rack, size, share),
    ]
    bounds = (band.low.astype(np.float64), band.high.astype(np.float64))
    found = [_Gauge("balance", "shard", names, by_shard, band.weight.astype(np.float64), *bounds, bounds[0], 1.0)]
    for what, kind, of_groups, group, weight, high in hard:
        if high.min() < weight.sum():  # it can be reached
            found.append(_Gauge(what, kind, of_groups, group, weight, np.zeros(len(high)), high, high, _HARD))
    for gauge in found:
        gauge.held = sum_floats(gauge.group[loads.owner], gauge.weight, len(gauge.high))
        gauge.factor /= max(float(gauge.weight.sum()), _EPSILON) / len(goal.shards)
    return found


def _refuse_impossible(gauges: list[_Gauge], goal: Goal) -> None:
    """Raise where a cap rules every placement out: all together are too much, or one partition is."""
    for gauge in gauges[1:]:
        groups = np.unique(gauge.group[list(goal.shards)])
        room, most, part = float(gauge.high[groups].sum()), float(gauge.high[groups].max()), int(gauge.weight.argmax())
        for who, load, cap in (
            ("all partitions", gauge.weight.sum(), room),
            (f"partition {part}", gauge.weight[part], most),
        ):
            if load > cap * (1 + _EPSILON):
                where = f"the goal's {gauge.kind}s have room for" if cap is room else f"no {gauge.kind} takes more than"
                raise RequestError(
                    f"no plan: {who} have {load:,.0f} {gauge.what}, and {where} {cap:,.0f}: {load - cap:,.0f} too many"
                )


class _Search:
    """Owners, and what they hold; moves go only to shards of the goal."""

    def __init__(self, cluster: Cluster, loads: Loads, goal: Goal, gauges: list[_Gauge], owner: Ints) -> None:
        self.owner, self._start, self._gauges = owner, loads.owner, gauges
        self._size, self._shards = loads.size_bytes, np.array(goal.shards)
        node = cluster.node_of_shard
        self._costs = _way_costs(cluster)[np.ix_(node, node)]
        self._home = self._shards[np.arange(len(owner)) % len(self._shards)]
        for gauge in gauges:
            gauge.held = sum_floats(gauge.group[owner], gauge.weight, len(gauge.high))

    def mend(self) -> None:
        """Move and swap partitions until nothing lessens what is out of bounds."""
        for _ in range(_PASSES):
            changes = 0
            for shard in self._out_of_bounds():
                while self._move(shard) or self._swap(shard):
                    changes += 1
            if not changes:
                return

    def undo_needless(self) -> None:
        """Put partitions back, the largest first, where nothing gets further out of bounds by it."""
        while True:
            moved = np.flatnonzero((self.owner != self._start) & np.isin(self._start, self._shards))
            gain = self._change(moved, self.owner[moved], self._start[moved])
            moved = moved[gain <= _EPSILON]
            if not len(moved):
                return
            part = int(moved[np.argmax(self._size[moved])])
            self._set(part, int(self._start[part]))

    def refuse_beyond_caps(self) -> None:
        """Raise RequestError where the search has ended beyond a cap."""
        for gauge in self._gauges[1:]:
            over = gauge.held - gauge.high
            worst = int(over.argmax())
            if over[worst] > max(gauge.high[worst], 1) * _EPSILON:
                raise RequestError(
                    f"no plan found that keeps all caps: {gauge.kind} {gauge.names[worst]} would have "
                    f"{gauge.held[worst]:,.0f} {gauge.what} of {gauge.high[worst]:,.0f}: {over[worst]:,.0f} too many"
                )

    def _out_of_bounds(self) -> list[int]:
        """Return the shards that hold too much or too little of something, the worst first."""
        worst = np.zeros(len(self._gauges[0].group))
        for gauge in self._gauges:
            worst += gauge.excess(gauge.held, gauge.all)[gauge.group]
        shards = np.flatnonzero(worst > _EPSILON)
        return [int(shard) for shard in shards[np.argsort(-worst[shards], kind="stable")]]

    def _change(self, parts: Ints, source: Ints, to: Ints, back: Ints | None = None) -> Floats:
        """Return what is added to the sum out of bounds when partitions go `to`, and others come `back` for them."""
        total: Floats = np.zeros(np.broadcast_shapes(parts.shape, to.shape))
        for gauge in self._gauges:
            weight = gauge.weight[parts] - (0 if back is None else gauge.weight[back])
            here, there = gauge.group[source], gauge.group[to]
            added = gauge.excess(gauge.held[here] - weight, here) - gauge.excess(gauge.held[here], here)
            added = added + gauge.excess(gauge.held[there] + weight, there) - gauge.excess(gauge.held[there], there)
            total = total + np.where(here == there, 0.0, added)
        return total

    def _partners(self, shard: int) -> Ints:
        """Return the goal's shards to exchange with: all where a cap is broken, else the fullest or the emptiest."""
        others = self._shards[self._shards != shard]
        if self._is_beyond_cap(shard):
            return np.asarray(others, np.int64)
        balance = self._gauges[0]
        sign = -1 if balance.held[shard] < balance.low[shard] else 1
        order = np.argsort(sign * balance.held[others], kind="stable")
        return np.asarray(others[order[:_PARTNERS]], np.int64)

    def _is_beyond_cap(self, shard: int) -> bool:
        return any(gauge.excess(gauge.held, gauge.all)[gauge.group[shard]] > _EPSILON for gauge in self._gauges[1:])

    def _move(self, shard: int) -> bool:
        """Make the best move from a shard or to it; return whether one lessens what is out of bounds."""
        balance, to = self._gauges[0], self._partners(shard)
        if balance.held[shard] < balance.low[shard] and not self._is_beyond_cap(shard):
            parts = np.flatnonzero(self.owner != shard)
            targets = np.full(len(parts), shard)
        else:
            mine = np.flatnonzero(self.owner == shard)
            parts, targets = np.repeat(mine, len(to)), np.tile(to, len(mine))
        change = self._change(parts, self.owner[parts], targets)
        if not len(change) or change.min() >= -_EPSILON:
            return False
        best = np.flatnonzero(change <= change.min() + _EPSILON)
        parts, targets = parts[best], targets[best]
        extra = self._added_bytes(parts, targets)
        cost = self._costs[self._start[parts], targets]
        first = np.lexsort((targets, parts, targets != self._home[parts], cost, extra))[0]
        self._set(int(parts[first]), int(targets[first]))
        return True

    def _swap(self, shard: int) -> bool:
        """Make the best swap of a partition of a shard with one elsewhere; return whether one helps."""
        mine, others = np.flatnonzero(self.owner == shard), np.flatnonzero(np.isin(self.owner, self._partners(shard)))
        # Of many partitions, some of each weight: they differ in little else.
        mine = mine[np.argsort(self._gauges[0].weight[mine], kind="stable")][:: 1 + len(mine) // _SWAPPED]
        best: tuple[float, int, int, int] | None = None
        for part in mine.tolist():  # one by one: the whole matrix may be large
            change = self._change(np.array([part]), np.array([shard]), self.owner[others], others)
            near = np.flatnonzero(change <= change.min(initial=0) + _EPSILON)
            if len(near) and change[near[0]] < -_EPSILON:
                extra = self._added_bytes(np.full(len(near), part), self.owner[others[near]])
                extra += self._added_bytes(others[near], np.full(len(near), shard))
                first = int(extra.argmin())
                found = (round(float(change[near[first]]), 9), int(extra[first]), part, int(others[near[first]]))
                best = found if best is None else min(best, found)
        if best is None:
            return False
        _, _, part, other = best
        there = int(self.owner[other])
        self._set(part, there)
        self._set(other, shard)
        return True

    def _added_bytes(self, parts: Ints, targets: Ints) -> Ints:
        """Return by how much the bytes that move in all rise when partitions go to targets."""
        was, will = self.owner[parts] != self._start[parts], targets != self._start[parts]
        return np.asarray((will.astype(np.int64) - was) * self._size[parts], np.int64)

    def _set(self, part: int, shard: int) -> None:
        """Change a partition's owner."""
        for gauge in self._gauges:
            gauge.held[gauge.group[self.owner[part]]] -= gauge.weight[part]
            gauge.held[gauge.group[shard]] += gauge.weight[part]
        self.owner[part] = shard
