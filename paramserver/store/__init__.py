"""A shard's rows: RocksDB, the applier that writes to it, the memtable before it, and reads across both."""
