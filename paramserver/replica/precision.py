"""In what precision a table in memory keeps its rows, and what a row takes in it."""

from __future__ import annotations

from headrace.kernels.row_quantization import PRECISIONS, Precision, row_size_bytes
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import DType, TableSpec

__all__ = ["PRECISIONS", "Precision", "check_precision", "precision_of", "stored_row_bytes"]

_FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def check_precision(wanted: str | None) -> None:
    """Check a setting.

    Raises:
        ConfigError: It names no precision.
    """
    if wanted is not None and wanted not in PRECISIONS:
        raise ConfigError(f"replica: precision is {wanted!r}, not one of {', '.join(PRECISIONS)}")


def precision_of(spec: TableSpec, wanted: Precision | None) -> Precision | None:
    """Return in what precision a table's rows are kept; None for their own dtype.

    A setting holds for tables of all kinds, so it counts only where it makes rows smaller: integer tables keep what
    they have, a bfloat16 table is not made float16, and a row of one column is not made a code with a scale and a bias.

    Args:
        spec: What the table is.
        wanted: The setting.
    """
    own_bytes = spec.dim * spec.dtype.size_bytes
    if wanted is None or spec.dtype not in _FLOATS or row_size_bytes(spec.dim, wanted) >= own_bytes:
        return None
    return wanted


def stored_row_bytes(spec: TableSpec, wanted: Precision | None) -> int:
    """Return what a row's weights take in memory, written whole."""
    precision = precision_of(spec, wanted)
    return spec.dim * spec.dtype.size_bytes if precision is None else row_size_bytes(spec.dim, precision)
