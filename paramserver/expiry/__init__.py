"""Expiry: which rows go, and their tombstones in the log."""
