"""The public classes of serving."""
