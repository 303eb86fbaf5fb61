"""A shard's log kept in an object store, and a shard made from it at any point."""
