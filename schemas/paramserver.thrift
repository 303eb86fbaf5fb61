/**
 * Headrace's one interface definition. Any Thrift client (framed transport, strict binary protocol) can speak it.
 *
 * Columns travel as `binary`: little-endian, contiguous, row-major, one element after the other with no padding.
 * ON THE WIRE: never renumber a field, an enum value or a method; add new optional fields with new numbers.
 */
namespace py headrace.gen.paramserver
namespace cpp headrace.paramserver
namespace java headrace.paramserver

/** Version that `hello` negotiates. A server refuses a client whose major version differs. */
const i32 PROTOCOL_VERSION = 1

/** Element type of a column. */
enum DType {
  FLOAT32 = 1,
  FLOAT16 = 2,
  BFLOAT16 = 3,
  FLOAT64 = 4,
  INT64 = 5,
  INT32 = 6,
  UINT8 = 7,
}

enum StateKind {
  /** As wide as the weights of the same column shard. */
  POINTWISE = 1,
  /** `width` elements a row; belongs to the row, so each column shard carries its own copy. */
  ROWWISE = 2,
}

enum ErrorCode {
  INTERNAL = 1,
  BAD_REQUEST = 2,
  UNKNOWN_TABLE = 3,
  SPEC_MISMATCH = 4,
  ROW_OUT_OF_RANGE = 5,
  NON_FINITE = 6,
  SEQUENCE_GAP = 7,
  FENCED = 8,
  OVERLOADED = 9,
  UNAVAILABLE = 10,
  UNAUTHORIZED = 11,
  PROTOCOL_MISMATCH = 12,
  GONE = 13,
}

/** What a client is allowed to do. */
enum Role {
  READER = 1,
  WRITER = 2,
  ADMIN = 3,
}

/** What a shard knows of a row. */
enum RowPresence {
  /** Never written, or forgotten. */
  MISSING = 0,
  PRESENT = 1,
  /** Deleted by an update that the shard remembers: its version is returned, its columns are zero. */
  DELETED = 2,
}

exception ServerError {
  1: required ErrorCode code,
  2: required string message,
  /** With SEQUENCE_GAP: the client seq that the shard accepts next. */
  3: optional i64 expected_seq,
  /** With OVERLOADED and UNAVAILABLE: wait at least this long. */
  4: optional i64 retry_after_ms,
  /** With FENCED: the epoch that holds the run now. */
  5: optional i64 epoch,
}

struct StateSpec {
  1: required string name,
  2: required StateKind kind,
  3: required DType dtype,
  /** Elements a row of a ROWWISE state; 0 for POINTWISE. */
  4: required i32 width,
}

/** One embedding table, whole: how it is sharded over trainers is no part of it. */
struct TableSpec {
  1: required string fqn,
  /** Rows of the unsharded table; 0 when ids are virtual and unbounded. */
  2: required i64 num_rows,
  3: required i32 dim,
  4: required DType dtype,
  5: required list<StateSpec> states,
  6: required bool has_identities,
}

struct ShardAddress {
  1: required i32 shard,
  2: required string host,
  3: required i32 port,
}

struct Limits {
  /** Longest frame, in bytes, that the shard reads. */
  1: required i64 max_frame_bytes,
  /** Bytes of requests that one client may have unanswered. */
  2: required i64 max_inflight_bytes,
  /** Requests that one client may have unanswered. */
  3: required i32 max_inflight_requests,
}

struct HelloRequest {
  1: required i32 protocol_version,
  2: required Role role,
  /** Name that groups the trainer's ranks and its restarts; empty for a reader. */
  3: required string run,
  /** Name of this client within the run, the same after a restart; empty for a reader. */
  4: required string client,
  /** The run's epoch; 0 asks for nothing but the reply. */
  5: required i64 epoch,
  6: required i32 rank,
  7: required i32 world_size,
  /** Tables that this client will write. */
  8: required list<TableSpec> tables,
  9: optional string token,
}

struct HelloReply {
  1: required i32 protocol_version,
  /** Identity of the data directory: another value means another store. */
  2: required string server_id,
  3: required i32 shard,
  4: required list<ShardAddress> shards,
  5: required Limits limits,
  /** Highest epoch that this shard has seen, of any run. */
  6: required i64 highest_epoch,
  /** Last client seq of (run, client, epoch) that is durable; 0 when none is. */
  7: required i64 last_client_seq,
  8: required list<TableSpec> tables,
}

/** `num_rows × width` elements of one optimizer state. */
struct StateColumn {
  1: required string name,
  2: required DType dtype,
  3: required i32 width,
  4: required binary data,
}

/** A value kept once a table (an optimizer's `iter`), not once a row. */
struct TableScalar {
  1: required string name,
  2: required DType dtype,
  3: required binary data,
}

/** New values for rows of one table, or of one column shard of it. */
struct TableDelta {
  1: required string fqn,
  /** `TableSpec` fingerprint: the shard refuses values laid out for another table. */
  2: required i64 fingerprint,
  /** First column that `weights` holds. */
  3: required i32 column_offset,
  /** Columns that `weights` holds: the table's dim when it is not split by columns. */
  4: required i32 width,
  /** int64[n], each at most once. */
  5: required binary row_ids,
  /** dtype[n, width] */
  6: required binary weights,
  7: required list<StateColumn> states,
  /** int64[n], present exactly when the table has identities. */
  8: optional binary identities,
  /** int64[k] rows to delete; disjoint from `row_ids`. */
  9: optional binary deleted_row_ids,
  10: optional list<TableScalar> scalars,
  /** Opaque to Headrace, n equal parts; what RES calls runtime meta. */
  11: optional binary runtime_meta,
}

struct SetEmbeddingsRequest {
  1: required string run,
  2: required string client,
  3: required i64 epoch,
  /** 1, 2, 3 … within (run, client, epoch) on this shard. */
  4: required i64 client_seq,
  /** Trainer's step at which the values were read. */
  5: required i64 step,
  /** Trainer's wall clock at that step, microseconds since 1970. */
  6: required i64 time_us,
  /** Everything that this client has for this shard up to `step` has now been sent. */
  7: required bool ends_step,
  /** With `ends_step`: no value newer than `step` was sent, so the shard's copy is the cut at `step`. */
  8: required bool is_exact_cut,
  9: required list<TableDelta> deltas,
  /**
   * Set by replay and backfill, whose batches do not come in the order of training: the rows' versions are
   * (version_epoch, step), and a row is written only where the shard has no version of it as new.
   */
  10: optional i64 version_epoch,
}

struct SetEmbeddingsReply {
  /** Position in the shard's update log. */
  1: required i64 seq,
  /** The batch was already durable; nothing changed. */
  2: required bool is_duplicate,
}

struct GetEmbeddingsRequest {
  1: required string fqn,
  /** int64[n] */
  2: required binary row_ids,
  3: required bool with_states,
  4: required bool with_versions,
}

struct GetEmbeddingsReply {
  /** uint8[n], `RowPresence`. */
  1: required binary presence,
  /** dtype[n, dim]; zeros where the row is not present. */
  2: required binary weights,
  3: required list<StateColumn> states,
  /** int64[n], with versions: 0 where missing. */
  4: optional binary epochs,
  5: optional binary steps,
  6: optional binary times_us,
  /** int64[n], when the table has identities. */
  7: optional binary identities,
  /** Every batch acked up to this seq is in the answer. */
  8: required i64 seq,
}

struct TableStatus {
  1: required TableSpec spec,
  /** As RocksDB estimates it: overwritten rows may count more than once. */
  2: required i64 num_rows_estimate,
}

struct ClientStatus {
  1: required string run,
  2: required string client,
  3: required i64 epoch,
  4: required i64 last_client_seq,
  /** Last step that the client ended; -1 before the first. */
  5: required i64 step,
  6: required bool is_connected,
}

struct StatusReply {
  1: required string server_id,
  2: required i32 shard,
  3: required i32 num_shards,
  4: required string version,
  5: required i64 pid,
  6: required double uptime_s,
  /** Last seq that is durable in the log. */
  7: required i64 log_seq,
  /** Last seq whose rows are in the store. */
  8: required i64 applied_seq,
  9: required i64 inflight_bytes,
  10: required i64 num_connections,
  11: required i64 num_refused,
  12: required i64 num_rows_written,
  13: required list<TableStatus> tables,
  14: required list<ClientStatus> clients,
}

service ParameterServer {
  /** First call on a connection. Registers tables, resumes a client, tells limits and the shard map. */
  HelloReply hello(1: HelloRequest request) throws (1: ServerError error),
  /** Answered when the batch is durable. */
  SetEmbeddingsReply setEmbeddings(1: SetEmbeddingsRequest request) throws (1: ServerError error),
  /** Sees every acked batch. */
  GetEmbeddingsReply getEmbeddings(1: GetEmbeddingsRequest request) throws (1: ServerError error),
  StatusReply status() throws (1: ServerError error),
}
