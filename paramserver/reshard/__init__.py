"""Moving partitions between shards: which, in what order, at what cost, and the protocol of a move."""
