"""Snapshots: cut, copied, published, fetched and read; and a server's directory, made aside."""
