"""Row ids ordered by shard, in blocks or by hash; within a shard they keep their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.runtime.cuda_module import Launcher, signed
from headrace.kernels.runtime.dispatch import implementation_of
from headrace.schemas.routing import shards_of_rows

__all__ = ["Bucketized", "block_bucketize", "block_bucketize_reference", "golden_multiple", "mix"]

# As in bucketize.cu.
_THREADS = 128
_MAX_SHARDS = 2048
_TILE_ROWS = 1024
# A warp of 64 lanes takes two tiles.
_TILES_PER_BLOCK = _THREADS // 32

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


class Bucketized(NamedTuple):
    """Rows ordered by shard, all on the device of the ids.

    Attributes:
        bounds: int64[num_shards + 1]; shard s has the rows `bounds[s]` to `bounds[s + 1] - 1`.
        row_ids: int64[n], ordered by shard.
        positions: int64[n]: where each of them was in the input.
        weights: `[n]` in the same order, bit for bit; None if none were given.
    """

    bounds: Tensor
    row_ids: Tensor
    positions: Tensor
    weights: Tensor | None


def block_bucketize(
    row_ids: Tensor, num_shards: int, *, block_rows: int | None = None, seed: int = 0, weights: Tensor | None = None
) -> Bucketized:
    """Order rows by shard, stably. On a GPU nothing waits for the result.

    Args:
        row_ids: int64[n], any order, may repeat.
        num_shards: 1 to 65,536; above 2048 a GPU uses torch's own operations.
        block_rows: Rows per shard: row r, a global id from 0 to `num_shards * block_rows - 1`, is on shard
            `r // block_rows`. None: `schemas.routing.shards_of_rows` gives the shard.
        seed: `TableSpec.seed` of the table, for the hash.
        weights: float64, float32, float16 or bfloat16 `[n]`, one per id; None for none.

    Raises:
        IndexError: On the CPU, an id is on no shard. On a GPU this stops the kernel: the next synchronization raises.
    """
    if row_ids.dtype != torch.int64 or row_ids.dim() != 1:
        raise ValueError(f"row_ids is {row_ids.dtype}{list(row_ids.shape)}: int64[n] is needed")
    if not 1 <= num_shards <= 2**16 or (block_rows is not None and block_rows < 1) or not 0 <= seed < 2**64:
        raise ValueError(f"{num_shards} shards, blocks of {block_rows} rows, seed {seed}: out of range")
    given = row_ids.new_empty(0) if weights is None else weights.detach().contiguous()
    if weights is not None and (
        weights.dtype not in _WEIGHT_DTYPES or weights.shape != row_ids.shape or weights.device != row_ids.device
    ):
        raise ValueError(f"{weights.dtype}{list(weights.shape)} on {weights.device} are no weights of the ids")
    bounds, ids, positions, moved = _block_bucketize(
        row_ids.contiguous(), num_shards, block_rows or 0, signed(seed), given
    )
    return Bucketized(bounds, ids, positions, None if weights is None else moved)


def block_bucketize_reference(
    row_ids: Tensor, num_shards: int, *, block_rows: int | None = None, seed: int = 0, weights: Tensor | None = None
) -> Bucketized:
    """Define `block_bucketize` in torch's operations."""
    if block_rows is None:
        mixed = mix((row_ids ^ signed(seed)) + golden_multiple(1))
        # The remainder of an unsigned number, which torch does not have.
        shards = (_shifted(mixed, 1) % num_shards * 2 + (mixed & 1)) % num_shards
    else:
        shards = torch.div(row_ids, block_rows, rounding_mode="floor")
    ordered, positions = torch.sort(shards, stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_shards + 1, device=row_ids.device, dtype=torch.int64))
    return Bucketized(bounds, row_ids[positions], positions, None if weights is None else weights[positions])


def mix(values: Tensor) -> Tensor:
    """Return splitmix64's finalizer of int64 values, read as unsigned, on any device; see `schemas.routing.mix`."""
    mixed = (values ^ _shifted(values, 30)) * signed(_MIX_1)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(_MIX_2)
    return mixed ^ _shifted(mixed, 31)


def golden_multiple(count: int) -> int:
    """Return a multiple of splitmix64's increment modulo 2⁶⁴, as a signed number."""
    return signed(count * _GOLDEN)


def launch_block_bucketize(
    launcher: Launcher, row_ids: Tensor, num_shards: int, block_rows: int, seed: int, weights: Tensor
) -> _Arrays:
    num_rows = row_ids.numel()
    num_tiles = -(-num_rows // _TILE_ROWS)
    blocks = -(-num_tiles // _TILES_PER_BLOCK)
    common = (row_ids, num_rows, block_rows, seed, num_shards, num_tiles)
    # By shard and then by tile, so the running sum is where each tile's rows of each shard begin.
    counts = row_ids.new_empty(num_shards * num_tiles)
    launcher.launch("count_shards_kernel", blocks, _THREADS, *common, counts)
    firsts = row_ids.new_zeros(num_shards * num_tiles + 1)
    torch.cumsum(counts, 0, out=firsts[1:])
    out_ids, positions, out_weights = torch.empty_like(row_ids), torch.empty_like(row_ids), torch.empty_like(weights)
    weight_bytes = weights.element_size() if weights.numel() else 0
    moved = (firsts, out_ids, positions, weights, out_weights, weight_bytes)
    launcher.launch("move_to_shards_kernel", blocks, _THREADS, *common, *moved)
    bounds = firsts[::num_tiles].clone() if num_tiles else row_ids.new_zeros(num_shards + 1)
    return bounds, out_ids, positions, out_weights


@torch.library.custom_op("headrace::block_bucketize", mutates_args=())
def _block_bucketize(
    row_ids: Tensor, num_shards: int, block_rows: int, seed: int, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run: Callable[..., _Arrays] = _bucketize_by_torch
    if row_ids.device.type == "cpu" or num_shards <= _MAX_SHARDS:
        ways = _bucketize_on_cpu, launch_block_bucketize, _bucketize_by_torch
        run = implementation_of("block_bucketize", "bucketize", row_ids.device, *ways)
    return run(row_ids, num_shards, block_rows, seed, weights)


@_block_bucketize.register_fake
def _block_bucketize_fake(row_ids: Tensor, num_shards: int, block_rows: int, seed: int, weights: Tensor) -> _Arrays:
    bounds = row_ids.new_empty(num_shards + 1)
    return bounds, torch.empty_like(row_ids), torch.empty_like(row_ids), torch.empty_like(weights)


def _bucketize_by_torch(row_ids: Tensor, num_shards: int, block_rows: int, seed: int, weights: Tensor) -> _Arrays:
    done = block_bucketize_reference(row_ids, num_shards, block_rows=block_rows or None, seed=seed)
    moved = weights[done.positions] if weights.numel() else weights.clone()
    return done.bounds, done.row_ids, done.positions, moved


def _bucketize_on_cpu(row_ids: Tensor, num_shards: int, block_rows: int, seed: int, weights: Tensor) -> _Arrays:
    ids = row_ids.numpy()
    if block_rows:
        shards = ids // block_rows
        # As unsigned numbers, negative ones are the highest.
        if ids.size and (highest := shards.view(np.uint64).max()) >= num_shards:
            raise IndexError(f"row {ids[shards.view(np.uint64) == highest][0]} is on none of {num_shards} shards")
    else:
        shards = shards_of_rows(seed % 2**64, ids, num_shards)
    # numpy sorts 8 or 16 bits by radix, several times as fast as 64.
    order = np.argsort(shards.astype(np.uint8 if num_shards <= 2**8 else np.uint16), kind="stable")
    bounds = np.zeros(num_shards + 1, np.int64)
    np.cumsum(np.bincount(shards, minlength=num_shards), out=bounds[1:])
    positions = torch.from_numpy(order)
    moved = weights[positions] if weights.numel() else weights.clone()
    return torch.from_numpy(bounds), torch.from_numpy(ids[order]), positions, moved


def _shifted(values: Tensor, bits: int) -> Tensor:
    # Shifts right as if the values were unsigned.
    shifted: Tensor = (values >> bits) & (2 ** (64 - bits) - 1)
    return shifted
