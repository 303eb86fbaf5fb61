"""A shard's rows: RocksDB, the way into it, and reads of what it has and does not have yet."""
