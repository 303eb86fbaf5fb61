"""Replay of update logs into a running server."""
