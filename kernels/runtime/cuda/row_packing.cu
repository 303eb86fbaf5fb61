// Gathers rows and states of many tables into one buffer in one launch, and writes packed rows back.
#include "packed_column.cuh"

__device__ inline const uint8* source_row(const PackedColumn& column, uint32 row) {
    const int64 id = column.row_ids[row];
    require(id >= 0 && id < column.source_rows);
    return column.source + id * column.source_stride;
}

// Rows of whole units: all loads are issued before the first store, and those of the ids before those of the rows. A check
// between them would delay the later ones.
__device__ void copy_whole_units(const PackedColumn& column, uint32 first_unit, uint32 num_units) {
    const uint32 row_units = (uint32)(column.row_bytes / UNIT_BYTES);
    const uint8* sources[UNITS_PER_THREAD];
    uint4 loaded[UNITS_PER_THREAD];
    bool are_rows = true;
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
        const uint32 unit = first_unit + i * PACK_THREADS;
        if (unit >= num_units) continue;
        const uint32 row = unit / row_units;
        const int64 id = column.row_ids[row];
        are_rows = are_rows && id >= 0 && id < column.source_rows;
        sources[i] = column.source + id * column.source_stride + (int64)(unit - row * row_units) * UNIT_BYTES;
    }
    require(are_rows);
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
        if (first_unit + i * PACK_THREADS < num_units) loaded[i] = *(const uint4*)sources[i];
    }
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
        const uint32 unit = first_unit + i * PACK_THREADS;
        if (unit < num_units) ((uint4*)column.out)[unit] = loaded[i];
    }
}

// Rows of any length: a unit of the buffer may hold the end of one row and the beginning of others. It is loaded word by
// word and stored at once, except for the column's last one, which may be shorter.
template <typename Word>
__device__ void copy_words(const PackedColumn& column, uint32 first_unit, uint32 num_units) {
    constexpr int UNIT_WORDS = UNIT_BYTES / sizeof(Word), HALF_WORDS = UNIT_WORDS / 2, WORD_BITS = 8 * sizeof(Word);
    const uint32 row_words = (uint32)(column.row_bytes / sizeof(Word));
    const int64 num_words = column.num_rows * row_words;
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
        const uint32 unit = first_unit + i * PACK_THREADS;
        if (unit >= num_units) return;
        const int64 first_word = (int64)unit * UNIT_WORDS;
        uint32 row = (uint32)(first_word / row_words);
        uint64 halves[2] = {0, 0};  // built by shifts: an array of words would not be kept in registers everywhere
        const int64 left = num_words - first_word;
        if (UNIT_WORDS <= 4 && row_words == 1 && left >= UNIT_WORDS) {
            // One number per row, as in a rowwise state: issue four loads of ids, then four of numbers.
            const Word* sources[UNIT_WORDS];
            bool are_rows = true;
#pragma unroll
            for (int k = 0; k < UNIT_WORDS; ++k) {
                const int64 id = column.row_ids[row + k];
                are_rows = are_rows && id >= 0 && id < column.source_rows;
                sources[k] = (const Word*)(column.source + id * column.source_stride);
            }
            require(are_rows);
#pragma unroll
            for (int k = 0; k < UNIT_WORDS; ++k) halves[k / HALF_WORDS] |= (uint64)*sources[k] << k % HALF_WORDS * WORD_BITS;
        } else {
            uint32 at = (uint32)(first_word - (int64)row * row_words);
            const Word* source = (const Word*)source_row(column, row);
#pragma unroll
            for (int k = 0; k < UNIT_WORDS; ++k) {
                if (k >= left) continue;
                if (at == row_words) {
                    source = (const Word*)source_row(column, ++row);
                    at = 0;
                }
                halves[k / HALF_WORDS] |= (uint64)source[at++] << k % HALF_WORDS * WORD_BITS;
            }
        }
        if (left >= UNIT_WORDS) {
            ((uint4*)column.out)[unit] = uint4{
                (uint32)halves[0], (uint32)(halves[0] >> 32), (uint32)halves[1], (uint32)(halves[1] >> 32)};
        } else {
#pragma unroll
            for (int k = 0; k < UNIT_WORDS; ++k) {
                const uint64 half = halves[k / HALF_WORDS];
                if (k < left) ((Word*)column.out)[first_word + k] = (Word)(half >> k % HALF_WORDS * WORD_BITS);
            }
        }
    }
}

__device__ void copy_row_ids(const PackedColumn& column, uint32 first_unit) {
    int64 ids[2 * UNITS_PER_THREAD];
    bool are_rows = true;
#pragma unroll
    for (int i = 0; i < 2 * UNITS_PER_THREAD; ++i) {
        const int64 row = 2 * ((int64)first_unit + i / 2 * PACK_THREADS) + i % 2;
        if (row >= column.num_rows) continue;
        ids[i] = column.row_ids[row];
        are_rows = are_rows && ids[i] >= 0 && ids[i] < column.source_rows;
    }
    require(are_rows);
#pragma unroll
    for (int i = 0; i < 2 * UNITS_PER_THREAD; ++i) {
        const int64 row = 2 * ((int64)first_unit + i / 2 * PACK_THREADS) + i % 2;
        if (row < column.num_rows) ((int64*)column.out)[row] = ids[i] + column.row_offset;
    }
}

// A block takes a tile of one column.
HEADRACE_KERNEL pack_rows_kernel(const PackedColumn* columns, int64 num_columns) {
    int64 low = 0, high = num_columns - 1;
    while (low < high) {  // the last column that begins at this tile or before
        const int64 middle = (low + high + 1) / 2;
        if (columns[middle].first_tile <= (int64)blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const PackedColumn column = columns[low];
    const uint32 num_units = (uint32)((column.num_rows * column.row_bytes + UNIT_BYTES - 1) / UNIT_BYTES);
    const uint32 first_unit = (uint32)(blockIdx.x - column.first_tile) * TILE_UNITS + threadIdx.x;
    switch (column.word_bytes) {
        case 0: return copy_row_ids(column, first_unit);
        case 16: return copy_whole_units(column, first_unit, num_units);
        case 8: return copy_words<uint64>(column, first_unit, num_units);
        case 4: return copy_words<uint32>(column, first_unit, num_units);
        case 2: return copy_words<uint16>(column, first_unit, num_units);
        default: return copy_words<uint8>(column, first_unit, num_units);
    }
}

template <typename Word>
__device__ void scatter_words(
    uint8* table, int64 table_rows, int64 table_stride, const int64* row_ids, int64 num_rows, int64 row_bytes,
    const uint8* packed) {
    const int64 row_words = row_bytes / sizeof(Word);
    for (int64 i = first_of_grid(); i < num_rows * row_words; i += grid_stride()) {
        const int64 row = i / row_words, id = row_ids[row];
        require(id >= 0 && id < table_rows);
        ((Word*)(table + id * table_stride))[i - row * row_words] = ((const Word*)packed)[i];
    }
}

// `word_bytes` is the longest access that both sides allow.
HEADRACE_KERNEL unpack_rows_kernel(
    uint8* table, int64 table_rows, int64 table_stride, const int64* row_ids, int64 num_rows, int64 row_bytes,
    const uint8* packed, int64 word_bytes) {
    switch (word_bytes) {
        case 16: return scatter_words<uint4>(table, table_rows, table_stride, row_ids, num_rows, row_bytes, packed);
        case 8: return scatter_words<uint64>(table, table_rows, table_stride, row_ids, num_rows, row_bytes, packed);
        case 4: return scatter_words<uint32>(table, table_rows, table_stride, row_ids, num_rows, row_bytes, packed);
        case 2: return scatter_words<uint16>(table, table_rows, table_stride, row_ids, num_rows, row_bytes, packed);
        default: return scatter_words<uint8>(table, table_rows, table_stride, row_ids, num_rows, row_bytes, packed);
    }
}
