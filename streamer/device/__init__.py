"""Changed rows on a GPU: the calls that are asked of it, and their marks."""
