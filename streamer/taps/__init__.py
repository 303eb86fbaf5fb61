"""Taps: which rows of a model's tables an optimizer has changed."""
