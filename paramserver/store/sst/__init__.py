"""RocksDB's table files, read and written without RocksDB."""
