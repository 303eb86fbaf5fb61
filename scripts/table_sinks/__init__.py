"""Files that tables are exported to: the same rows make the same bytes."""
