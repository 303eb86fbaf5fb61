"""A whole server from outside: rows of all shards, their logs, their digests."""
