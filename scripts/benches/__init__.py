"""Benches: each beside its limit and its peers, in one run."""
