"""The server side: transport, admission, update log, shard store, and the processes that run them."""
