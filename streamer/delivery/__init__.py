"""Delivery: from a staging buffer to the last shard's ack."""
