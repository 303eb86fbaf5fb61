"""Files that tables are backfilled from. Nothing in such a file is ever run."""
