"""Plans reach their goal within all bounds, move few bytes, and are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.paramserver.reshard.inventory import Cluster, Goal, Loads, Node, Shard, drain
from headrace.paramserver.reshard.placement import Band
from headrace.paramserver.reshard.planner import Plan, make_plan
from headrace.paramserver.reshard.stages import CHECKPOINTS
from headrace.schemas.errors import RequestError

MB = 10**6


def cluster(num_shards: int, *, free: int | list[int] = 10**15, apply_rows_s: float = 1e6, racks: int = 1) -> Cluster:
    """Return one node a shard, with 500 MB/s of disk and 1 GB/s of link."""
    room = free if isinstance(free, list) else [free] * num_shards
    return Cluster(
        nodes=tuple(
            Node(name=f"n{i}", rack=str(i % racks), free_bytes=each, read_bytes_s=5e8, write_bytes_s=5e8)
            for i, each in enumerate(room)
        ),
        shards=tuple(Shard(node=i) for i in range(num_shards)),
        link_bytes_s=np.full((num_shards, num_shards), 1e9),
        apply_rows_s=apply_rows_s,
        round_trip_s=0.01,
        follow_lag_s=0.1,
        stage_overhead_s=1.0,
    )


def loads(owner: list[int] | np.ndarray, size: int | list[int] | np.ndarray = MB, updates_s: float = 1.0) -> Loads:
    """Return partitions with rows of 100 bytes and equal updates."""
    owners = np.array(owner, np.int64)
    sizes = np.broadcast_to(np.array(size, np.int64), owners.shape).copy()
    return Loads(owner=owners, size_bytes=sizes, num_rows=sizes // 100, updates_s=np.full(len(owners), updates_s))


def goal(num_shards: int, **kwargs: object) -> Goal:
    return replace(Goal(shards=tuple(range(num_shards))), **kwargs)


def owners_after(start: np.ndarray, plan: Plan) -> np.ndarray:
    """Return owners after all moves; each must begin where its partition is."""
    owner = start.copy()
    for stage in plan.stages:
        for move in stage.moves:
            assert owner[move.partition] == move.source != move.destination
            owner[move.partition] = move.destination
    return owner


def assert_disks_suffice(before: Cluster, start: Loads, plan: Plan) -> None:
    """Replay the stages: what comes in must fit before anything that goes out is removed."""
    free = {index: node.free_bytes for index, node in enumerate(before.nodes)}
    least = dict(free)
    for stage in plan.stages:
        for move in stage.moves:
            free[before.shards[move.destination].node] -= int(start.size_bytes[move.partition])
        least = {node: min(least[node], free[node]) for node in free}
        for move in stage.moves:
            free[before.shards[move.source].node] += int(start.size_bytes[move.partition])
    assert min(least.values()) >= 0
    told = {disk.node: disk.least_free_bytes for disk in plan.disks}
    assert all(told.get(node.name, node.free_bytes) == least[index] for index, node in enumerate(before.nodes))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 5), (4, 8), (8, 4), (5, 2)])
def test_equal_loads_move_the_least_that_whole_partitions_allow(before: int, after: int) -> None:
    """Each new shard gets just what the tolerance asks for, and each old one gives just what it has too much."""
    start, target = loads(np.arange(1024) % before), goal(after)
    here = cluster(max(before, after))
    band = Band.of(here, start, target)
    held = np.bincount(start.owner, start.size_bytes, len(here.shards))
    gives, takes = np.maximum(held - band.high, 0), np.maximum(band.low - held, 0)
    least = max(np.ceil(gives / MB).sum(), np.ceil(takes / MB).sum())
    plan = make_plan(here, start, target)
    assert plan.moved_bytes == least * MB
    assert len(plan.stages) == 1


def test_growing_and_shrinking_returns_to_the_start() -> None:
    """2→3→5→2 shards end with the map that they began with."""
    start = at = loads(np.arange(1024) % 2)
    for num in (3, 5, 2):
        at = replace(at, owner=owners_after(at.owner, make_plan(cluster(5), at, goal(num))))
        assert set(at.owner.tolist()) == set(range(num))
    np.testing.assert_array_equal(at.owner, start.owner)


def test_even_shards_are_left_alone() -> None:
    """What is within the tolerance does not move."""
    plan = make_plan(cluster(4), loads(np.arange(1000) % 4), goal(4))
    assert not plan.stages
    assert plan.moved_bytes == plan.least_bytes == plan.seconds == 0
    assert plan.text().startswith("nothing to move")


def test_drained_node_ends_empty_and_nothing_else_moves() -> None:
    """A drain moves each partition of the node once, and leaves uneven others as they are."""
    owner = np.array([0] * 50 + [1] * 20 + [2] * 30)
    plan = make_plan(cluster(3), start := loads(owner), drain(cluster(3), start, "n2"))
    after = owners_after(owner, plan)
    assert {move.source for stage in plan.stages for move in stage.moves} == {2}
    assert np.bincount(after).tolist() in ([50, 50], [51, 49], [52, 48])


@pytest.mark.parametrize("balance", ["bytes", "rows", "updates"])
def test_evens_out_what_it_is_asked_to(balance: str) -> None:
    """The measured quantity that is named is within the tolerance afterwards."""
    rng = np.random.default_rng(7)
    start = Loads(
        owner=rng.integers(0, 4, 400) // 2,
        size_bytes=rng.integers(1, 9, 400) * MB,
        num_rows=rng.integers(1, 9, 400) * 1000,
        updates_s=rng.integers(1, 9, 400).astype(float),
    )
    target = goal(4, balance=balance)
    plan = make_plan(cluster(4), start, target)
    band = Band.of(cluster(4), start, target)
    held = np.bincount(owners_after(start.owner, plan), band.weight, 4)
    assert ((band.low <= held) & (held <= band.high)).all()
    assert plan.least_bytes <= plan.moved_bytes <= 1.1 * plan.least_bytes


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(1, 8),
    after=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    is_even=st.booleans(),
    room=st.floats(0.15, 3.0),
)
def test_every_plan_reaches_its_goal_within_its_disks(
    before: int, after: int, seed: int, is_even: bool, room: float
) -> None:
    """On random loads all shards end within the tolerance with near the least bytes; or the disks are too small."""
    rng = np.random.default_rng(seed)
    owner = np.arange(512) % before if is_even else rng.integers(0, before, 512)
    start = loads(owner, rng.integers(50, 200, 512) * MB)
    free = int(start.size_bytes.sum() / after * room)
    here, target = cluster(max(before, after), free=free), goal(after)
    try:
        plan = make_plan(here, start, target)
    except RequestError as error:
        assert "bytes" in str(error) and room < 1.3
        return
    band = Band.of(here, start, target)
    after_owner = owners_after(start.owner, plan)
    held = np.bincount(after_owner, band.weight, len(here.shards))
    assert room < 1.3 or ((band.low <= held) & (held <= band.high)).all()
    assert_disks_suffice(here, start, plan)
    direct = int(start.size_bytes[after_owner != start.owner].sum())
    assert direct <= plan.moved_bytes
    if room > 1.3:
        assert plan.least_bytes <= direct
        assert plan.moved_bytes <= max(1.1 * plan.least_bytes, plan.least_bytes + 2 * 200 * MB)


def test_caps_bind_where_the_balance_alone_would_break_them() -> None:
    """Updates, memory and racks each stay within their caps."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 9, 300) * MB
    start = replace(loads(np.arange(300) % 3, sizes), updates_s=rng.integers(1, 20, 300).astype(float))
    here = cluster(6, racks=2)
    caps = [replace(shard, max_updates_s=520.0, max_memory_bytes=3.3e7) for shard in here.shards]
    here = replace(here, shards=tuple(caps), memory_bytes_per_row=10.0, max_rack_share=0.505)
    after = owners_after(start.owner, make_plan(here, start, goal(6, tolerance=0.3)))
    assert np.bincount(after, start.updates_s).max() <= 520
    assert np.bincount(after, start.num_rows).max() * 10 <= 3.3e7
    assert np.bincount(after % 2, start.size_bytes).max() <= 0.505 * start.size_bytes.sum()


def test_full_disks_are_emptied_in_stages() -> None:
    """A node that lacks room gets its partitions after others have left it."""
    here, start = cluster(3, free=[0, 20 * MB, 60 * MB]), loads([0] * 50 + [1] * 50)
    plan = make_plan(here, start, goal(3), owner=np.array([1] * 50 + [2] * 50))
    assert len(plan.stages) >= 2
    assert_disks_suffice(here, start, plan)
    np.testing.assert_array_equal(owners_after(start.owner, plan), [1] * 50 + [2] * 50)


def test_two_full_nodes_swap_through_a_third() -> None:
    """Where nothing can move directly, a partition goes through a node with room, and is counted twice."""
    here, start = cluster(3, free=[0, 0, 5 * MB]), loads([0, 1], 5 * MB)
    plan = make_plan(here, start, goal(3), owner=np.array([1, 0]))
    assert_disks_suffice(here, start, plan)
    assert owners_after(start.owner, plan).tolist() == [1, 0]
    assert plan.moved_bytes == 15 * MB


def test_searches_for_an_order_that_does_not_close_the_way() -> None:
    """The greedy first step would fill the only room; the plan waits with it, and needs no detour."""
    here = cluster(4, free=[0, MB, 0, 0])
    start = loads([0, 1, 3], MB)
    plan = make_plan(here, start, goal(4), owner=np.array([1, 0, 1]))
    assert_disks_suffice(here, start, plan)
    assert plan.moved_bytes == 3 * MB


def test_predicted_seconds_follow_the_formula() -> None:
    """Copy, follow, verify, purge and pause are what `stages.py` says, computed here by hand."""
    here, start = cluster(2, apply_rows_s=1000), loads([0] * 10, 100 * MB, updates_s=10.0)
    start = replace(start, num_rows=np.full(10, 100))
    plan = make_plan(here, start, goal(2), owner=np.array([0] * 5 + [1] * 5))
    times = plan.stages[0].times
    assert times.copy_s == pytest.approx(500 / 500)
    assert times.follow_s == pytest.approx(50 * 1 / (1000 - 50))
    assert times.verify_s == pytest.approx(500 / 500)
    assert times.purge_s == pytest.approx(500 / 1000)
    assert times.write_pause_s == pytest.approx(50 * 0.1 / 1000 + 3 * 0.01)
    assert times.seconds == pytest.approx(1 + 1 + times.follow_s + 1 + 0.5 + times.write_pause_s)
    assert plan.seconds == times.seconds


def test_predicted_seconds_have_the_scans_of_whole_stores() -> None:
    """Each move scans all of its source twice to bring rows over, and once to purge; cores of a node are shared."""
    start = loads([0] * 10 + [1] * 10, 100 * MB)
    here = replace(cluster(3), scan_bytes_s=1e8, checkpoint_s=0.5)
    target = np.array([0] * 9 + [2] + [1] * 8 + [2] * 2)
    (stage,) = make_plan(here, start, goal(3), owner=target).stages
    load_s, remove_s = 3 * MB / 1e6, 2 * MB / 1e6
    assert stage.times.copy_s == pytest.approx(max(1000 / 100, load_s))
    assert stage.times.verify_s == pytest.approx(1000 / 100 + 2 * 300 / 100)
    assert stage.times.purge_s == pytest.approx(1000 / 100 + remove_s)
    parts_s = stage.times.copy_s + stage.times.follow_s + stage.times.verify_s + stage.times.purge_s
    assert stage.times.seconds == pytest.approx(1 + CHECKPOINTS * 2 * 0.5 + parts_s + stage.times.write_pause_s)
    for cores, copy_s in ((1, 2 * 1000 / 100 + load_s), (2, 1000 / 100 + load_s / 2), (4, 1000 / 100)):
        together = replace(
            here,
            nodes=(replace(here.nodes[0], num_cores=cores),),
            shards=(Shard(node=0),) * 3,
            link_bytes_s=np.full((1, 1), np.inf),
        )
        (stage,) = make_plan(together, start, goal(3), owner=target).stages
        assert stage.times.copy_s == pytest.approx(copy_s)


@pytest.mark.parametrize(
    ("here", "start", "target", "message"),
    [
        (
            cluster(2, apply_rows_s=100),
            loads([0, 1] * 100),
            goal(2),
            "no plan: all partitions have 200 updates a second, and the goal's shards have room for 180: 20 too many",
        ),
        (
            cluster(2, apply_rows_s=100),
            loads([0], updates_s=95),
            goal(2),
            "no plan: partition 0 have 95 updates a second, and no shard takes more than 90: 5 too many",
        ),
        (
            cluster(2, free=[10 * MB, 30 * MB]),
            loads([1] * 40, MB),
            goal(1),
            "no plan: all partitions have 40,000,000 bytes on disk, and the goal's nodes have room for 10,000,000: "
            "30,000,000 too many",
        ),
        (
            replace(cluster(2, racks=2), max_rack_share=0.5),
            loads([0, 1, 1], [MB, MB, MB]),
            goal(2),
            "no plan found that keeps all caps: rack 1 would have 2,000,000 bytes of 1,500,000: 500,000 too many",
        ),
    ],
)
def test_refuses_what_cannot_work_and_says_by_how_much(here: Cluster, start: Loads, target: Goal, message: str) -> None:
    """One line names the quantity, the room and what is too much."""
    with pytest.raises(RequestError) as caught:
        make_plan(here, start, target)
    assert str(caught.value) == message


def test_refuses_disks_without_room_in_any_order() -> None:
    """Two full nodes cannot swap when no third has room."""
    with pytest.raises(RequestError, match=r"5,000,000 bytes from shard 0 to 1 need 5,000,000 more .* in any order"):
        make_plan(cluster(2, free=0), loads([0, 1], 5 * MB), goal(2), owner=np.array([1, 0]))


def test_refuses_updates_that_outrun_the_link() -> None:
    """A partition whose updates are more than the link carries could never be sealed."""
    here = replace(cluster(2), link_bytes_s=np.full((2, 2), 1000.0))
    with pytest.raises(RequestError, match=r"updates outrun the link from shard 0 to 1: 1,000 bytes a second, 100 too"):
        make_plan(here, loads([0, 0], updates_s=10), goal(2), owner=np.array([0, 1]))


def test_near_links_are_used_first() -> None:
    """Of two givers and two takers each gives to the near one, for the same bytes."""
    links = np.full((4, 4), 1e6)
    links[0, 3] = links[1, 2] = 1e9
    here = replace(cluster(4), link_bytes_s=links)
    plan = make_plan(here, loads(np.arange(1000) % 2), goal(4))
    ways = {(move.source, move.destination) for stage in plan.stages for move in stage.moves}
    assert ways == {(0, 3), (1, 2)}


def _digest() -> str:
    rng = np.random.default_rng(5)
    start = loads(rng.integers(0, 6, 600), rng.integers(1, 50, 600) * MB)
    plans = [
        make_plan(cluster(9, racks=3), start, goal(9)),
        make_plan(cluster(6, free=1000 * MB), start, goal(6), owner=(start.owner + 1) % 6),
    ]
    assert plans[0].stages and len(plans[1].stages) > 1
    return hashlib.sha256(json.dumps([plan.to_dict() for plan in plans]).encode()).hexdigest()


def test_same_input_gives_the_same_plan_in_threads_and_under_any_hash_seed() -> None:
    """Byte for byte, as JSON."""
    with ThreadPoolExecutor(4) as pool:
        digests = {future.result() for future in [pool.submit(_digest) for _ in range(4)]}
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_planner; print(test_planner._digest())"
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_text_says_moves_bytes_seconds_and_disks() -> None:
    """What `--plan` prints is for people: runs of partitions, units, one line a way."""
    plan = make_plan(cluster(2), loads([0] * 10, 100 * MB), goal(2), owner=np.array([0] * 5 + [1] * 5))
    lines = plan.text().splitlines()
    assert lines[0].startswith("5 moves among 10 partitions, 500 MB (at least 500 MB) in 1 stage, 12.0 s, writes pause")
    assert lines[1] == "fullest shard, of the mean of bytes: 2.00 × before, 1.00 × after"
    assert lines[3] == "  shard 0 → 1: partitions 5-9"
    assert lines[4].startswith("disk of n1: 500 MB more at most, ")
    scattered = make_plan(cluster(3), loads([0, 1] * 500, MB), goal(3))
    told = [line for line in scattered.text().splitlines() if " → 2: partitions " in line]
    assert len(told) == 2
    for line in told:
        numbers, more = line.partition(": partitions ")[2].removesuffix(" more").split(" and ")
        assert numbers.count(",") == 7 and int(more) > 100, line


@pytest.mark.parametrize(("before", "after"), [(900, 1000), (1000, 900)])
def test_thousand_shards_keep_to_the_goal(before: int, after: int) -> None:
    """16,384 partitions on 1,000 shards; how long it takes is measured by the bench."""
    start, target = loads(np.arange(16_384) % before), goal(after)
    plan = make_plan(cluster(1000), start, target)
    held = np.bincount(owners_after(start.owner, plan), start.size_bytes, 1000)
    band = Band.of(cluster(1000), start, target)
    assert ((band.low <= held) & (held <= band.high)).all()
    assert plan.moved_bytes <= 1.1 * plan.least_bytes
