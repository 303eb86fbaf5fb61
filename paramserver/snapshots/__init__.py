"""Snapshots: cut, copied, published, fetched, read and restored."""
