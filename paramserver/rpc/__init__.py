"""Thrift over TCP and TLS: frames, connections, admission, deadlines, and the client of one shard."""
