"""Expiry: deletes the rows that a table's policy selects."""
