"""The update log in a stream of NATS JetStream: an ack means that a majority of servers has the record on disk."""
