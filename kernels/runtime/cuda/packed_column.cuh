// The columns to be packed: made by `packing.py` on the host, or by `dirty_drain.cu` on the device.
#pragma once
#include "common.cuh"

constexpr int PACK_THREADS = 256;
constexpr int UNITS_PER_THREAD = 4;
constexpr int UNIT_BYTES = 16;
constexpr int TILE_UNITS = PACK_THREADS * UNITS_PER_THREAD;  // the same number as in `packing.py`
constexpr int64 PACK_TILE_BYTES = TILE_UNITS * UNIT_BYTES;

// One column of one table. `word_bytes` is the longest access that the source's address, stride and row length allow: 16,
// 8, 4, 2 or 1; 0 means that the row ids themselves are the column. Tiles between columns are empty.
struct PackedColumn {
    int64 first_tile;
    const uint8* source;
    int64 source_rows, source_stride;
    const int64* row_ids;
    int64 num_rows, row_bytes;
    uint8* out;
    int64 word_bytes;
    int64 row_offset;
};
