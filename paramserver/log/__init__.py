"""The update log: the truth that the store is a view of."""
