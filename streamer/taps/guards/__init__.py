"""Checks that refuse a model, or warn, because rows could be missed."""
