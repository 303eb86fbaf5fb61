"""Identity claims: what the index of a table with identities keeps of an identity, the row that took it last.

    key    byte  0      4        6       8                16
                 table  0xFFFF   0       identity
                 u32    u16      u16     u64, two's complement; all big-endian
    value  byte  0      1        2          4      8      16       24
                 flags  version  frequency  epoch  step   time_us  row
                 u8     u8       u16        u32    i64    i64      i64; all little-endian

A claim's key is a row key whose column shard no row can have. Its value begins with the header of a row's record: the
version is that of the update that wrote the row with the identity.

A claim may be out of date: the row has been given to another identity since, or deleted. It counts only when the row is
there and has the identity.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import MAX_DIM, ColumnShard

__all__ = ["CLAIMS", "CLAIMS_SHARD", "NO_IDENTITY", "in_key_order"]

# ON DISK: never renumber. Columns end at MAX_DIM, so no row begins there, and none has no columns.
CLAIMS_SHARD = ColumnShard(offset=MAX_DIM, width=0)

# ON THE WIRE: the identity of a row that no raw id is mapped to.
NO_IDENTITY = -1


# Of all tables the same.
CLAIMS = RecordLayout.without_columns(CLAIMS_SHARD, [("row", "<i8")])


def in_key_order(identities: npt.NDArray[np.int64]) -> npt.NDArray[np.intp] | None:
    """Return the order in which the keys of ascending identities ascend; None where it is their own.

    Args:
        identities: int64[n], ascending.
    """
    num_negative = int(np.searchsorted(identities, 0))
    # In two's complement, read without a sign, the negative ones come behind the others.
    return np.roll(np.arange(identities.size), -num_negative) if num_negative else None
