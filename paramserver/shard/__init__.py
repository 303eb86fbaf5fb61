"""One shard: its Thrift methods and its process."""
