"""A server built aside from the rows and logs of another one with another number of shards."""
