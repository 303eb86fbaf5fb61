"""Copies of the tables: built, kept up to date, switched and closed."""
