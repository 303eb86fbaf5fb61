"""Settings of a shard's RocksDB, and RocksDB's own options for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import rocksdict

from headrace.schemas.errors import ConfigError

__all__ = ["StoreConfig", "rocks_options"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Settings of a shard's RocksDB.

    Attributes:
        block_cache_bytes: Memory for blocks, indexes and filters; what does not fit is read from files. A shard's comes
            from its configuration (`ShardConfig`).
        write_buffer_bytes: Memory of one memtable; up to three exist. Larger ones are flushed less often and leave
            fewer files to compact.
        block_bytes: Bytes that one point lookup reads and checks, and that the cache holds as one. Larger blocks need a
            smaller index.
        bloom_bits_per_key: 10 lets one lookup in a hundred read a block in vain; each bit costs 1/8 byte a row.
        max_background_jobs: Threads that flush and compact.
        rows_per_write: Rows of one write, during which no other Python thread runs: about 1.2 µs a row.
        max_open_files: Files that RocksDB holds open (`process/open_files.py`); to read of another one it opens it
            anew, which is one read of the disk more.
        file_bytes: Rows of at least so many bytes go to RocksDB as a file, fewer through its memtable. A file costs a
            third of the time a row, but a few milliseconds to take in, and a later compaction.
    """

    block_cache_bytes: int = 32 << 20
    write_buffer_bytes: int = 64 << 20
    block_bytes: int = 8 << 10
    bloom_bits_per_key: int = 10
    max_background_jobs: int = 2
    rows_per_write: int = 2048
    max_open_files: int = 512
    file_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        for name, low, high in (
            ("block_cache_bytes", 1 << 20, 1 << 50),
            ("write_buffer_bytes", 1 << 16, 1 << 40),
            ("block_bytes", 1 << 10, 1 << 22),
            ("bloom_bits_per_key", 1, 30),
            ("max_background_jobs", 2, 256),
            ("rows_per_write", 1, 1 << 20),
            ("max_open_files", 20, 1 << 30),
            ("file_bytes", 0, 1 << 50),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"store setting {name} is {value}, not in {low}..{high}")


_LEVEL_0_FILES = 8
_LEVEL_1_BYTES = 1 << 30
_SUBCOMPACTIONS = 2


def rocks_options(config: StoreConfig, *, is_direct: bool = False) -> Any:
    """Return RocksDB's options for a store.

    Args:
        config: Settings.
        is_direct: Flush and compact past the page cache; only where `supports_direct_io`.
    """
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(config.block_cache_bytes))
    table.set_block_size(config.block_bytes)
    table.set_bloom_filter(config.bloom_bits_per_key, False)
    table.set_format_version(5)
    # As our own files have: one kind of checksum, that of the log too, for all who read blocks themselves.
    table.set_checksum_type(rocksdict.ChecksumType.crc32c())
    # Indexes and filters in the cache, so that its size bounds them too; those of the newest files stay there.
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    # Trained floats hardly shrink, and reading them back costs time.
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_write_buffer_size(config.write_buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_max_background_jobs(config.max_background_jobs)
    # Files that are taken in are long: by RocksDB's defaults every fourth would have level 1, smaller than two of them,
    # written anew. A look-up asks the bloom filters of so many files at most.
    options.set_level_zero_file_num_compaction_trigger(_LEVEL_0_FILES)
    options.set_max_bytes_for_level_base(_LEVEL_1_BYTES)
    # Nothing is taken in while level 0 is full, and one compaction at a time empties it: several threads share it.
    options.set_max_subcompactions(_SUBCOMPACTIONS)
    # Files go to the disk as they are written: one large sync would hold up the update log's.
    options.set_bytes_per_sync(1 << 20)
    # Past the page cache, which is for what lookups read.
    options.set_use_direct_io_for_flush_and_compaction(is_direct)
    options.set_max_open_files(config.max_open_files)
    options.enable_statistics()  # hits and misses of the block cache, for the metrics
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(16 << 20)
    return options
