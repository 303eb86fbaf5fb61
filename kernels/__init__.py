"""Operations on rows: mark dirty, compact, gather and pack, quantize.

Each has a plain PyTorch reference, which says what the right answer is, and faster paths that are tested
against it.
"""
