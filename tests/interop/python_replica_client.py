"""A reader with nothing of Headrace's but its IDL, on a replica: Apache Thrift's Python library and its generated code.

    thrift --gen py -out GENERATED schemas/paramserver.thrift
    python tests/interop/python_replica_client.py GENERATED 127.0.0.1:7701

It reads the rows that `python_client.py` has written to the server, and says what came back.
"""

from __future__ import annotations

import struct
import sys

generated, address = sys.argv[1:]
sys.path.insert(0, generated)

from headrace_rpc import ParameterServer  # noqa: E402 (it lies in a folder that is only known now)
from headrace_rpc.constants import PROTOCOL_VERSION  # noqa: E402
from headrace_rpc.ttypes import ErrorCode, GetEmbeddingsRequest, HelloRequest, Role, ServerError  # noqa: E402
from thrift.protocol.TBinaryProtocol import TBinaryProtocol  # noqa: E402
from thrift.transport.TSocket import TSocket  # noqa: E402
from thrift.transport.TTransport import TFramedTransport  # noqa: E402

FQN = "interop.weight"


def hello(role: int) -> HelloRequest:
    """Return what a client says that is nobody in particular."""
    return HelloRequest(
        protocol_version=PROTOCOL_VERSION, role=role, run="", client="", epoch=0, rank=0, world_size=1, tables=[]
    )


host, port = address.rsplit(":", 1)
transport = TFramedTransport(TSocket(host, int(port)))
client = ParameterServer.Client(TBinaryProtocol(transport, strictRead=True, strictWrite=True))
transport.open()

try:
    client.hello(hello(Role.WRITER))
except ServerError as error:
    assert error.code == ErrorCode.UNAUTHORIZED
    refusal = error.message
else:
    raise AssertionError("a replica has greeted a writer")

greeting = client.hello(hello(Role.READER))
assert [(shard.shard, shard.port) for shard in greeting.shards] == [(0, int(port))]
(table,) = greeting.tables
assert (table.fqn, table.dim, table.states) == (FQN, 2, [])

wanted = struct.pack("<4q", 999, 0, 8, 7)
rows = client.getEmbeddings(GetEmbeddingsRequest(fqn=FQN, row_ids=wanted, with_states=False, with_versions=False))
assert rows.presence == bytes([1, 1, 0, 1])
assert struct.unpack("<8f", rows.weights) == (999.0, 999.5, 0.0, 0.5, 0.0, 0.0, 7.0, 7.5)

replica = client.status().replica
assert replica.is_ready and replica.failure is None and replica.visible_step == 1
print(f"read 3 of 4 rows of {FQN} at step {replica.visible_step}; refused: {refusal}")
transport.close()
