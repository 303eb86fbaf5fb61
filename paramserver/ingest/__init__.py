"""The path of an update into a shard: whose turn it is, the log, the ack, and those who follow."""
