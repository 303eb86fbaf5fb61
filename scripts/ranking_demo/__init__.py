"""The demo: a model trained on a real interaction log, streamed and ranked from a replica."""
