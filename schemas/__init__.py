"""Formats and their codecs: what travels on the wire and lies on disk. No I/O, no torch, no asyncio."""
