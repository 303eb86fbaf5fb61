"""Operations on rows: mark dirty rows, drain, pack, digest, quantize; each with a plain PyTorch reference."""
