"""A client with nothing of Headrace's but its IDL: Apache Thrift's Python library and the code that its compiler makes.

    thrift --gen py -out GENERATED schemas/paramserver.thrift
    python tests/interop/python_client.py GENERATED 127.0.0.1:7601

It registers a table on a server of one shard, writes four rows, reads five, and says what came back.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import Any

generated, address = sys.argv[1:]
sys.path.insert(0, generated)

from headrace_rpc import ParameterServer  # noqa: E402 (it lies in a folder that is only known now)
from headrace_rpc.constants import PROTOCOL_VERSION  # noqa: E402
from headrace_rpc.ttypes import (  # noqa: E402
    DType,
    GetEmbeddingsRequest,
    HelloRequest,
    Role,
    RowPresence,
    ServerError,
    SetEmbeddingsRequest,
    TableDelta,
    TableSpec,
)
from thrift.protocol.TBinaryProtocol import TBinaryProtocol  # noqa: E402
from thrift.transport.TSocket import TSocket  # noqa: E402
from thrift.transport.TTransport import TFramedTransport  # noqa: E402

FQN, NUM_ROWS, DIM = "interop.weight", 1000, 2
RUN, CLIENT = "interop-python", "rank0"


def hello(client: Any, *, epoch: int, tables: list[Any]) -> Any:
    """Say who we are; with an epoch above 0, register the tables and open the session."""
    return client.hello(
        HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            role=Role.WRITER,
            run=RUN,
            client=CLIENT,
            epoch=epoch,
            rank=0,
            world_size=1,
            tables=tables,
        )
    )


host, port = address.rsplit(":", 1)
transport = TFramedTransport(TSocket(host, int(port)))
client = ParameterServer.Client(TBinaryProtocol(transport, strictRead=True, strictWrite=True))
transport.open()

# The first hello only asks. An epoch must be higher than any that the shards have seen; the reply to the second hello
# has the fingerprint of each table.
spec = TableSpec(fqn=FQN, num_rows=NUM_ROWS, dim=DIM, dtype=DType.FLOAT32, states=[], has_identities=False)
epoch = hello(client, epoch=0, tables=[]).highest_epoch + 1
session = hello(client, epoch=epoch, tables=[spec])
(registered,) = [table for table in session.tables if table.fqn == FQN]
assert session.limits.max_frame_bytes > 0 and len(session.shards) == 1

row_ids = (7, 0, 999, 42)
weights = [float(row_id) + column / 2 for row_id in row_ids for column in range(DIM)]
delta = TableDelta(
    fqn=FQN,
    fingerprint=registered.fingerprint,
    column_offset=0,
    width=DIM,
    row_ids=struct.pack("<4q", *row_ids),
    weights=struct.pack("<8f", *weights),
    states=[],
)
reply = client.setEmbeddings(
    SetEmbeddingsRequest(
        run=RUN,
        client=CLIENT,
        epoch=epoch,
        client_seq=session.last_client_seq + 1,
        step=1,
        time_us=time.time_ns() // 1000,
        ends_step=True,
        is_exact_cut=True,
        deltas=[delta],
    )
)
assert not reply.is_duplicate

# It is durable now, and every read sees it. Row 8 was never written.
wanted = struct.pack("<5q", *row_ids, 8)
rows = client.getEmbeddings(GetEmbeddingsRequest(fqn=FQN, row_ids=wanted, with_states=False, with_versions=True))
assert rows.presence == bytes([RowPresence.PRESENT] * 4 + [RowPresence.MISSING])
assert struct.unpack("<10f", rows.weights) == (*weights, 0.0, 0.0)
assert struct.unpack("<5q", rows.epochs) == (*[epoch] * 4, 0)

try:
    client.getEmbeddings(GetEmbeddingsRequest(fqn="no.such", row_ids=b"", with_states=False, with_versions=False))
except ServerError as error:
    refusal = error.message
else:
    raise AssertionError("an unknown table was read")

status = client.status()
assert status.log_seq >= reply.seq
assert [table.spec.fqn for table in status.tables] == [FQN]
print(f"wrote and read {len(row_ids)} rows of {FQN} as epoch {epoch}; log seq {reply.seq}; refused: {refusal}")
transport.close()
