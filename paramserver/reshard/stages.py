"""In which stages partitions move, and how long each takes.

The time of a stage, whose moves all go at once. With B bytes, u updates a second and so on summed over its moves:

    seconds  = overhead + copy + follow + verify + purge + pause
    overhead = the stage's own, plus `CHECKPOINTS` checkpoints for each move of the shard that has most of them
    copy     = the most of: B out of a node ÷ its disk's read, B into a node ÷ its disk's write, B from node to node ÷
               their link, B out of or into a node over the network ÷ its fastest link, which stands for its card, and
               the work of processors: scans at the sources, and rows in ÷ apply at the destinations
    follow   = the most of, over destinations: u · copy ÷ (apply - own - u), where `own` is what the shard is sent
               already; and over pairs of nodes, in bytes: b · copy ÷ (link - b), where b is u times the bytes of a row
    verify   = the most of: B out of and into a node ÷ its disk's read; and scans at the sources, plus scans at the
               destinations
    purge    = scans at the sources, and rows out ÷ apply
    pause    = the most of, over destinations: u · lag ÷ (apply - own), plus `ROUND_TRIPS` round trips

A move's rows lie all over a store, so a scan goes through all of it: bytes of the shard ÷ scan, for each of its moves.
The work of processors is that of the shard that has most, or of all shards of a node ÷ its cores if that is more.

`pause` is how long rows that move cannot be written: the tail that the destination has not followed when the source
seals, then seal, ready and released, and the trainer's second try.

A stage needs room for what it copies while the source still has it; the source's room is there in the next one. If all
moves fit in one stage, that is the plan. If not, A* searches the placements between: a state is where each bundle of
partitions is, its neighbours are the stages that a few greedy orders give, and the bound is the copying that is left.
Where nothing can move directly, a bundle may go through a node that has room. The plan takes the least time of those
searched, in the way of PyTorch's DTensor redistribution, which finds its path among one-step transforms with a cost
each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from headrace.paramserver.reshard.inventory import FOLLOWABLE, Cluster, Floats, Loads, sum_floats
from headrace.paramserver.reshard.transport import Ints
from headrace.schemas.errors import RequestError

__all__ = ["CHECKPOINTS", "ROUND_TRIPS", "StageTimes", "find_stages", "time_stage"]

ROUND_TRIPS = 3
CHECKPOINTS = 4
_MAX_STATES = 400
_NUM_BUNDLES = 256
_NUM_FOCUS = 6
_NUM_DETOURS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Predicted seconds of a stage; `write_pause_s` is of the rows that move."""

    copy_s: float
    follow_s: float
    verify_s: float
    purge_s: float
    write_pause_s: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Moves of one stage: partitions or bundles of them, each with source and destination shard."""

    size: Floats
    rows: Floats
    updates: Floats
    update_bytes: Floats
    source: Ints
    to: Ints


class _Speeds:
    """A cluster's numbers as arrays."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.node = cluster, cluster.node_of_shard
        self.num_nodes, self.num_shards = len(cluster.nodes), len(cluster.shards)
        self.read = np.array([node.read_bytes_s for node in cluster.nodes])
        self.write = np.array([node.write_bytes_s for node in cluster.nodes])
        self.cores = np.array([node.num_cores for node in cluster.nodes])
        self.free = np.array([node.free_bytes for node in cluster.nodes], np.float64)
        others = np.where(np.eye(self.num_nodes, dtype=bool), 0.0, cluster.link_bytes_s)
        self.card_out = np.where(others.max(axis=1) > 0, others.max(axis=1), np.inf)
        self.card_in = np.where(others.max(axis=0) > 0, others.max(axis=0), np.inf)

    def by_node(self, shards: Ints, size: Floats) -> Floats:
        """Return sums by the shards' nodes, float64[nodes]."""
        return sum_floats(self.node[shards], size, self.num_nodes)

    def by_way(self, moves: _Moves, size: Floats) -> tuple[Floats, Floats]:
        """Return sums by pair of nodes, and each such pair's link."""
        source, to = self.node[moves.source], self.node[moves.to]
        ways, which = np.unique(source * self.num_nodes + to, return_inverse=True)
        return sum_floats(which, size, len(ways)), self.cluster.link_bytes_s.reshape(-1)[ways]

    def least_copy_s(self, moves: _Moves) -> float:
        """Return the copying of the moves by any way: no node's disk or card is faster."""
        out, into = self.by_node(moves.source, moves.size), self.by_node(moves.to, moves.size)
        is_far = self.node[moves.source] != self.node[moves.to]
        far_out = self.by_node(moves.source, moves.size * is_far) / self.card_out
        far_in = self.by_node(moves.to, moves.size * is_far) / self.card_in
        return float(max((out / self.read).max(), (into / self.write).max(), far_out.max(), far_in.max()))

    def work_s(self, seconds: Floats) -> float:
        """Return how long the shards' processors take for work of so many seconds, float64[shards], of one core."""
        return float(max(seconds.max(), (self.by_node(np.arange(self.num_shards), seconds) / self.cores).max()))

    def times(self, moves: _Moves, own: Floats, held: Floats) -> StageTimes:
        """Return a stage's times, by the formula above, of shards that are sent `own` rows and hold `held` bytes."""
        cluster, num_shards = self.cluster, self.num_shards
        ways = np.unique(moves.source * num_shards + moves.to)
        num_out, num_in = (np.bincount(ends, minlength=num_shards) for ends in (ways // num_shards, ways % num_shards))
        checkpoints_s = CHECKPOINTS * cluster.checkpoint_s * float((num_out + num_in).max())
        scan_out_s = num_out * held / cluster.scan_bytes_s
        scan_in_s = num_in * (held + sum_floats(moves.to, moves.size, num_shards)) / cluster.scan_bytes_s
        load_s, remove_s = (
            sum_floats(ends, moves.rows, num_shards) / cluster.apply_rows_s for ends in (moves.to, moves.source)
        )
        size_of_way, link = self.by_way(moves, moves.size)
        copy_s = max(self.least_copy_s(moves), float((size_of_way / link).max()), self.work_s(scan_out_s + load_s))
        updates = sum_floats(moves.to, moves.updates, self.num_shards)
        is_to = updates > 0
        spare = cluster.apply_rows_s - own[is_to]
        follow_s = (updates[is_to] * copy_s / (spare - updates[is_to])).max(initial=0)
        sent, link = self.by_way(moves, moves.update_bytes)
        follow_s = max(float(follow_s), float((sent * copy_s / (link - sent)).max()))
        both = self.by_node(moves.source, moves.size) + self.by_node(moves.to, moves.size)
        verify_s = max(float((both / self.read).max()), self.work_s(scan_out_s) + self.work_s(scan_in_s))
        purge_s = self.work_s(scan_out_s + remove_s)
        tail_s = (updates[is_to] * cluster.follow_lag_s / spare).max(initial=0)
        pause_s = float(tail_s) + ROUND_TRIPS * cluster.round_trip_s
        overhead_s = cluster.stage_overhead_s + checkpoints_s
        return StageTimes(
            copy_s=copy_s,
            follow_s=follow_s,
            verify_s=verify_s,
            purge_s=purge_s,
            write_pause_s=pause_s,
            seconds=overhead_s + copy_s + follow_s + verify_s + purge_s + pause_s,
        )

    def fits(self, moves: _Moves, own: Floats, free: Floats) -> bool:
        """Return whether disks, links and destinations bear all the moves at once."""
        updates = sum_floats(moves.to, moves.updates, self.num_shards)
        can_apply = own + updates <= self.cluster.apply_rows_s * FOLLOWABLE * (1 + 1e-9)
        sent, link = self.by_way(moves, moves.update_bytes)
        has_room = self.by_node(moves.to, moves.size) <= free
        return bool(has_room.all() and (can_apply | (updates == 0)).all() and (sent <= link * FOLLOWABLE).all())


def time_stage(cluster: Cluster, loads: Loads, owner: Ints, parts: Ints, to: Ints) -> StageTimes:
    """Return the predicted times of one stage.

    Args:
        cluster: The speeds.
        loads: The partitions' loads; its `owner` is not looked at.
        owner: int64[partitions], at the begin of the stage.
        parts: int64[moves], the partitions that move, at least one.
        to: int64[moves], their new shards.
    """
    own = sum_floats(owner, loads.updates_s, len(cluster.shards))
    held = sum_floats(owner, loads.size_bytes.astype(np.float64), len(cluster.shards))
    return _Speeds(cluster).times(_moves(loads, owner, parts, to), own, held)


def find_stages(cluster: Cluster, loads: Loads, target: Ints) -> list[tuple[Ints, Ints]]:
    """Return the stages that lead to the target: partitions and their new shards, ascending.

    Raises:
        RequestError: In no order is there room on the disks, or is a destination or a link fast enough to follow.
    """
    speeds, parts = _Speeds(cluster), np.flatnonzero(target != loads.owner)
    if not len(parts):
        return []
    own = sum_floats(loads.owner, loads.updates_s, len(cluster.shards))
    moves = _moves(loads, loads.owner, parts, target[parts])
    if speeds.fits(moves, own, speeds.free):
        return [(parts, target[parts])]
    bundles = _bundles(speeds, moves)
    held = sum_floats(loads.owner, loads.size_bytes.astype(np.float64), len(cluster.shards))
    path = _Order(speeds, moves, bundles, own, held).search()
    stages = []
    for before, after in pairwise(path):
        found = [(parts[bundles[k]], shard) for k, shard in enumerate(after) if before[k] != shard]
        moved, to = np.concatenate([each for each, _ in found]), np.concatenate([np.full(len(e), s) for e, s in found])
        order = np.argsort(moved)
        stages.append((moved[order], to[order]))
    return stages


def _moves(loads: Loads, owner: Ints, parts: Ints, to: Ints) -> _Moves:
    updates = loads.updates_s[parts]
    size, rows = loads.size_bytes[parts].astype(np.float64), loads.num_rows[parts].astype(np.float64)
    return _Moves(size, rows, updates, updates * loads.row_bytes[parts], owner[parts], to)


def _bundles(speeds: _Speeds, moves: _Moves) -> list[Ints]:
    """Return moves of one source and one destination in bundles, so that few states are there to search.

    A bundle is larger than a quarter of the room on any disk that lacks some only where a single partition is.
    """
    free, into = speeds.free, speeds.by_node(moves.to, moves.size)
    tight = free[(into > free) & (free > 0)]
    largest = min(moves.size.sum() / _NUM_BUNDLES, tight.min(initial=np.inf) / 4)
    bundles: list[list[int]] = []
    size, last = 0.0, (-1, -1)
    for move in np.lexsort((np.arange(len(moves.to)), moves.to, moves.source)).tolist():
        way = (int(moves.source[move]), int(moves.to[move]))
        if way != last or size + moves.size[move] > largest:
            bundles.append([])
            size, last = 0.0, way
        bundles[-1].append(move)
        size += moves.size[move]
    return [np.array(bundle) for bundle in bundles]


_At = tuple[int, ...]  # the shard of each bundle


class _Order:
    """The search for the order of moves."""

    def __init__(self, speeds: _Speeds, moves: _Moves, bundles: list[Ints], own: Floats, held: Floats) -> None:
        self._speeds, self._own, self._held = speeds, own, held
        self._size, self._rows, self._updates, self._update_bytes = (
            np.array([values[bundle].sum() for bundle in bundles])
            for values in (moves.size, moves.rows, moves.updates, moves.update_bytes)
        )
        self._start: _At = tuple(int(moves.source[bundle[0]]) for bundle in bundles)
        self._final: _At = tuple(int(moves.to[bundle[0]]) for bundle in bundles)

    def search(self) -> list[_At]:
        """Return the states from now to the target, at the least time that was found."""
        # (bound of the whole time, entry's number, time so far, state): the number decides between equal bounds.
        heap = [(self._bound(self._start), 0, 0.0, self._start)]
        previous: dict[_At, _At] = {}
        times = {self._start: 0.0}
        done: set[_At] = set()
        num_entries, closest = 1, self._start
        while heap and len(done) < _MAX_STATES:
            _, _, time_s, at = heapq.heappop(heap)
            if at == self._final:
                path = [at]
                while path[-1] != self._start:
                    path.append(previous[path[-1]])
                return path[::-1]
            if at in done:
                continue
            done.add(at)
            closest = min(closest, at, key=self._left_bytes)
            own, held = self._at(at, self._own, self._updates), self._at(at, self._held, self._size)
            for following in self._neighbours(at, own):
                after_s = time_s + self._speeds.times(self._between(at, following), own, held).seconds
                if after_s < times.get(following, np.inf):
                    times[following], previous[following] = after_s, at
                    heapq.heappush(heap, (after_s + self._bound(following), num_entries, after_s, following))
                    num_entries += 1
        tried = "in any order" if not heap else f"in the {_MAX_STATES} placements that were tried"
        raise RequestError(f"no plan: {self._blocked(closest)} {tried}")

    def _pending(self, at: _At) -> list[int]:
        return [k for k, shard in enumerate(at) if shard != self._final[k]]

    def _left_bytes(self, at: _At) -> float:
        return float(sum(self._size[k] for k in self._pending(at)))

    def _between(self, at: _At, following: _At) -> _Moves:
        moved = np.array([k for k, shard in enumerate(at) if shard != following[k]], np.int64)
        source, to = np.array(at)[moved], np.array(following)[moved]
        return _Moves(self._size[moved], self._rows[moved], self._updates[moved], self._update_bytes[moved], source, to)

    def _bound(self, at: _At) -> float:
        """Return a time that the rest takes at least."""
        return self._speeds.least_copy_s(self._between(at, self._final))

    def _free(self, at: _At) -> Floats:
        by_node = self._speeds.by_node
        return self._speeds.free + by_node(np.array(self._start), self._size) - by_node(np.array(at), self._size)

    def _at(self, at: _At, first: Floats, of_bundles: Floats) -> Floats:
        """Return what the shards have in a state, of what they had at first, float64[shards]."""
        num = self._speeds.num_shards
        gone = sum_floats(np.array(self._start), of_bundles, num)
        return np.asarray(first - gone + sum_floats(np.array(at), of_bundles, num))

    def _neighbours(self, at: _At, own: Floats) -> Iterator[_At]:
        """Yield states one stage away, each once."""
        pending, free, node = self._pending(at), self._free(at), self._speeds.node
        into = self._speeds.by_node(np.array(self._final)[pending], self._size[pending])
        lack = into - free
        tight = [int(each) for each in np.argsort(-lack, kind="stable")[:_NUM_FOCUS] if lack[each] > 0]

        def leaves(k: int) -> float:
            return -float(lack[node[at[k]]])

        def is_on(focus: int, k: int) -> bool:
            return bool(node[at[k]] == focus)

        def is_elsewhere(focus: int, k: int) -> float:
            return float(node[at[k]] != focus)

        orders: list[tuple[Callable[[int], float], Callable[[int], bool]]] = [
            (leaves, lambda k: True),  # out of the nodes that lack most
            (leaves, lambda k: lack[node[self._final[k]]] <= 0),  # only to where all that comes has room
            (lambda k: 0.0, lambda k: True),  # the largest first
        ]
        for focus in tight:
            orders += [(partial(is_elsewhere, focus), lambda k: True), (leaves, partial(is_on, focus))]
        seen = {at}
        for rank, may_move in orders:
            chosen = sorted((k for k in pending if may_move(k)), key=lambda k: (rank(k), -self._size[k], k))
            following = self._fill(at, chosen, own, free)
            if following not in seen:
                seen.add(following)
                yield following
        if len(seen) == 1:
            yield from self._detours(at, pending, own, free)

    def _fill(self, at: _At, chosen: list[int], own: Floats, free: Floats) -> _At:
        """Return the state after all of the chosen that fit, in their order."""
        room, updates, sent = free.tolist(), own.tolist(), dict[tuple[int, int], float]()
        links, node, following = self._speeds.cluster.link_bytes_s, self._speeds.node.tolist(), list(at)
        apply_s = self._speeds.cluster.apply_rows_s * FOLLOWABLE * (1 + 1e-9)
        for k in chosen:
            to = self._final[k]
            way = (node[at[k]], node[to])
            on_link = sent.get(way, 0.0) + self._update_bytes[k]
            can_follow = not self._updates[k] or updates[to] + self._updates[k] <= apply_s
            if self._size[k] <= room[way[1]] and can_follow and on_link <= links[way] * FOLLOWABLE:
                room[way[1]] -= self._size[k]
                updates[to] += self._updates[k]
                sent[way] = on_link
                following[k] = to
        return tuple(following)

    def _detours(self, at: _At, pending: list[int], own: Floats, free: Floats) -> Iterator[_At]:
        """Yield states in which one bundle that is in the way has gone to a node with room."""
        speeds, wanted = self._speeds, {int(self._speeds.node[self._final[k]]) for k in pending}
        in_the_way = [k for k in pending if int(speeds.node[at[k]]) in wanted]
        shards = sorted(range(speeds.num_shards), key=lambda shard: (own[shard], shard))
        for k in sorted(in_the_way, key=lambda k: (self._size[k], k))[:_NUM_DETOURS]:
            for shard in shards:
                if speeds.node[shard] == speeds.node[at[k]]:
                    continue
                following = (*at[:k], shard, *at[k + 1 :])
                if speeds.fits(self._between(at, following), own, free):
                    yield following

    def _blocked(self, at: _At) -> str:
        """Return what keeps the move that lacks least from a state, and how much it lacks."""
        speeds, free, own = self._speeds, self._free(at), self._at(at, self._own, self._updates)
        apply_s, lacks = speeds.cluster.apply_rows_s * FOLLOWABLE, []
        for k in self._pending(at):
            source, to = int(speeds.node[at[k]]), int(speeds.node[self._final[k]])
            where = f"from shard {at[k]} to {self._final[k]}"
            link = float(speeds.cluster.link_bytes_s[source, to]) * FOLLOWABLE
            for need, room, text in (
                (
                    self._size[k],
                    free[to],
                    f"{{:,.0f}} bytes {where} need {{:,.0f}} more on the disk of node {speeds.cluster.nodes[to].name}",
                ),
                (
                    own[self._final[k]] + self._updates[k],
                    apply_s,
                    f"updates outrun applying {where}: {{:,.0f}} a second, {{:,.0f}} too many",
                ),
                (
                    self._update_bytes[k],
                    link,
                    f"updates outrun the link {where}: {{:,.0f}} bytes a second, {{:,.0f}} too many",
                ),
            ):
                if need > room:
                    lacks.append((float((need - room) / max(need, 1e-9)), k, text.format(need, need - room)))
        return min(lacks)[2]
