"""Moving partitions between shards: the protocol of a move, at its source and at its destination."""
