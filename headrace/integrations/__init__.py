"""Streaming from other people's training loops: a module for each framework, which imports it."""
