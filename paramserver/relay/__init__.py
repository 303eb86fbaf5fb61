"""The relay: mirrors of a server's logs, and snapshots, for any number of followers behind one connection a shard."""
