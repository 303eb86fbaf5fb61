"""Metrics, status, problems and the status page of a running server."""
