"""Readers and writers of table files for backfill and export."""
