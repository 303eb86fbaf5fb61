"""A replica's tables: row storage in memory or on disk, and lookups."""
