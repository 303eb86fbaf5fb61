"""Moving partitions between shards: which, in what order, and what it costs."""
