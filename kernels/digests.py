"""Digest rows of tensors on the CPU or a GPU, bit for bit as `schemas/row_digest.py` does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.bucketize import golden_multiple, mix
from headrace.kernels.packing import to_device
from headrace.kernels.runtime.cuda_module import Launcher, num_blocks
from headrace.kernels.runtime.dispatch import implementation_of
from headrace.schemas.row_digest import digest_rows

__all__ = ["row_digests", "row_digests_reference"]

_WORD_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_THREADS = 256
_WARP_LANES = 32


def row_digests(row_ids: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Return the digest of each row. Their wrapping sum is the digest of the set of rows in any order.

    Args:
        row_ids: int64[n], global.
        columns: Weights, then the states in the spec's order: each `[n, width]` or `[n]`, any type, on the ids' device.

    Returns:
        int64[n] on that device, the bits of the unsigned digests.
    """
    if row_ids.dtype != torch.int64 or row_ids.dim() != 1:
        raise ValueError(f"row_ids is {row_ids.dtype}{list(row_ids.shape)}: int64[n] is needed")
    rows = [column.detach().unsqueeze(1) if column.dim() == 1 else column.detach() for column in columns]
    for column in rows:
        if column.dim() != 2 or column.shape[0] != row_ids.numel() or column.device != row_ids.device:
            raise ValueError(f"{list(column.shape)} on {column.device} are not the rows of {row_ids.numel()} ids")
    digests: Tensor = _row_digests(row_ids.contiguous(), [column.contiguous() for column in rows])
    return digests


def row_digests_reference(row_ids: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Define `row_digests` in torch's operations."""
    hashed = torch.zeros_like(row_ids)
    for number, column in enumerate(columns):
        words = _words_of(column)
        # As unsigned numbers, for which torch has few operations.
        values = words.long() & (2 ** (8 * words.element_size()) - 1)
        hashed += (values * _keys(number, words.shape[1]).to(row_ids.device)).sum(1)
    return mix(hashed + mix(row_ids + golden_multiple(1)))


def launch_row_digests(launcher: Launcher, row_ids: Tensor, columns: list[Tensor]) -> Tensor:
    digests = torch.empty_like(row_ids)
    words = [_words_of(column) for column in columns]
    keys = [_keys(number, its_words.shape[1]) for number, its_words in enumerate(words)]
    jobs, first_key = [], 0
    for its_words in words:
        size = its_words.element_size()
        jobs.append([its_words.data_ptr(), its_words.stride(0) * size, its_words.shape[1], size, first_key])
        first_key += its_words.shape[1]
    # One copy to the device: the columns, then the keys.
    inputs = to_device(
        torch.cat([torch.tensor(jobs, dtype=torch.int64, device="cpu").flatten(), *keys]), row_ids.device
    )
    blocks, all_keys = num_blocks(row_ids.numel() * _WARP_LANES, _THREADS), inputs[5 * len(jobs) :]
    arguments = (row_ids, row_ids.numel(), inputs, len(jobs), all_keys, digests)
    launcher.launch("row_digests_kernel", blocks, _THREADS, *arguments)
    return digests


@torch.library.custom_op("headrace::row_digests", mutates_args=())
def _row_digests(row_ids: Tensor, columns: list[Tensor]) -> Tensor:
    ways = _digest_on_cpu, launch_row_digests, row_digests_reference
    digests: Tensor = implementation_of("row_digests", "row_digests", row_ids.device, *ways)(row_ids, columns)
    return digests


def _digest_on_cpu(row_ids: Tensor, columns: list[Tensor]) -> Tensor:
    # As words, because numpy lacks some of torch's types.
    words = [_words_of(column).numpy() for column in columns]
    return torch.from_numpy(digest_rows(row_ids.numpy(), words).view(np.int64))


@_row_digests.register_fake
def _row_digests_fake(row_ids: Tensor, columns: list[Tensor]) -> Tensor:
    return torch.empty_like(row_ids)


def _words_of(column: Tensor) -> Tensor:
    """Return rows as words of 4, 2 or 1 bytes, the longest that divides a row; a copy if they are not aligned."""
    column = (column.unsqueeze(1) if column.dim() == 1 else column).contiguous()
    row_bytes = column.shape[1] * column.element_size()
    dtype = _WORD_DTYPES[next(size for size in _WORD_DTYPES if row_bytes % size == 0)]
    if not column.numel():
        return torch.empty(column.shape[0], row_bytes // dtype.itemsize, dtype=dtype, device=column.device)
    if column.storage_offset() * column.element_size() % dtype.itemsize:
        column = column.clone()
    return column.flatten().view(dtype).view(column.shape[0], -1)


def _keys(column: int, count: int) -> Tensor:
    seed = mix(torch.tensor([golden_multiple(column + 1)], dtype=torch.int64, device="cpu"))
    return mix(seed + torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * golden_multiple(1)) | 1
