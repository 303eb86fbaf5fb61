/**
 * Headrace's one interface definition. Any Thrift client (framed transport, strict binary protocol) can speak it.
 *
 * Columns travel as `binary`: little-endian, contiguous, row-major, without padding.
 * ON THE WIRE: never renumber a field, an enum value or a method; add new optional fields with new numbers.
 */
namespace py headrace_rpc
namespace cpp headrace.paramserver
namespace java headrace.paramserver

/** Version that `hello` negotiates. A server refuses a client whose major version differs. */
const i32 PROTOCOL_VERSION = 2

/** Element type of a column. */
enum DType {
  FLOAT32 = 1,
  FLOAT16 = 2,
  BFLOAT16 = 3,
  FLOAT64 = 4,
  INT64 = 5,
  INT32 = 6,
  UINT8 = 7,
  BOOL = 8,
  INT16 = 9,
  INT8 = 10,
}

enum StateKind {
  /** As wide as the weights of the same column shard. */
  POINTWISE = 1,
  /** `width` elements per row; belongs to the row, so each column shard carries its own copy. */
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
  /** A table belongs to another run. */
  OWNED = 14,
}

/** A client's permissions. */
enum Role {
  READER = 1,
  WRITER = 2,
  ADMIN = 3,
}

/** The kind of a record of the update log. */
enum UpdateKind {
  /** A batch: `body` is the `setEmbeddings` call as received, a whole Thrift message. */
  BATCH = 1,
  /** A writer's hello: `header` has its tables and session; there is no body. */
  HELLO = 2,
}

/** Whether a shard has a row. */
enum RowPresence {
  /** Never written, or deleted. */
  MISSING = 0,
  PRESENT = 1,
}

struct ShardAddress {
  1: required i32 shard,
  2: required string host,
  3: required i32 port,
  /** The term of the claim by which the shard is there; absent where nobody claims shards. The highest one is right. */
  4: optional i64 term,
  /** Name of the cluster's node that runs the shard, for people; absent from a server on one machine. */
  5: optional string node,
}

exception ServerError {
  1: required ErrorCode code,
  2: required string message,
  /** With SEQUENCE_GAP: the client seq that the shard accepts next. */
  3: optional i64 expected_seq,
  /** With OVERLOADED: wait at least this long. */
  4: optional i64 retry_after_ms,
  /** With FENCED: the epoch that holds the run now. */
  5: optional i64 epoch,
  /** With GONE: the log ends before the requested seq, because the server was set back to an older copy of itself. */
  6: optional bool is_set_back,
  /** With UNAVAILABLE: where this shard is about to open. */
  8: optional list<ShardAddress> shards,
  /** With UNAVAILABLE: a shard of the server, with another number of shards, that has taken the place of this one. */
  9: optional ShardAddress successor,
}

struct StateSpec {
  1: required string name,
  2: required StateKind kind,
  3: required DType dtype,
  /** Elements per row of a ROWWISE state; 0 for POINTWISE. */
  4: required i32 width,
}

/** One whole embedding table; it does not say how trainers shard it. */
struct TableSpec {
  /** `model:path`, or the path alone under the default model. */
  1: required string fqn,
  /** Rows of the unsharded table; 0 when ids are virtual and unbounded. */
  2: required i64 num_rows,
  3: required i32 dim,
  4: required DType dtype,
  5: required list<StateSpec> states,
  6: required bool has_identities,
  /** The server sends it, for clients that do not compute it; from a client it is optional, and checked. */
  7: optional i64 fingerprint,
  /**
   * Of a dense tensor (a parameter or buffer that is no embedding table): its shape. Its elements in row-major order fill
   * the rows, the last one with zeros behind them. Absent for an embedding table.
   */
  8: optional list<i64> shape,
  /**
   * How the trained model's modules use the table, in JSON (docs/wire.md). Servers pass it on, and take that of the
   * newest trainer. It is no part of the fingerprint. Absent: the trainer does not say.
   */
  10: optional string uses,
}

struct Limits {
  /** Longest frame, in bytes, that the shard reads. */
  1: required i64 max_frame_bytes,
  /** Bytes of unanswered requests that one client may have. */
  2: required i64 max_inflight_bytes,
  /** Number of unanswered requests that one client may have. */
  3: required i32 max_inflight_requests,
}

struct HelloRequest {
  1: required i32 protocol_version,
  2: required Role role,
  /** Name shared by the trainer's ranks and restarts; empty for a reader. */
  3: required string run,
  /** Name of this client within the run, the same after a restart; empty for a reader. */
  4: required string client,
  /** The run's epoch; 0 only requests the reply. */
  5: required i64 epoch,
  6: required i32 rank,
  /** Number of ranks; 0, with rank 0, for a client that is not a trainer. */
  7: required i32 world_size,
  /** Tables that this client will write. */
  8: required list<TableSpec> tables,
  9: optional string token,
  /**
   * A starting trainer claims its epoch at shard 0, which gives each epoch to one trainer only. FENCED, with the highest
   * epoch so far, if it was given before.
   */
  10: optional bool claims_epoch,
  /**
   * A trainer takes `tables` from the runs that own them, and fences those runs. Without it, OWNED, except from runs that have
   * ended and from backfills.
   */
  11: optional bool takes_over,
  /**
   * Those of `tables` of which this trainer sends all rows, if the shard lacks any. A table that is new, grows or lacks rows is
   * complete on a shard once every rank of the epoch has ended a step after `after_step` there. No effect on a complete one.
   */
  12: optional list<string> fills,
  /** The highest step that any rank had ended, or sent rows of, before it marked all rows of `fills`; -1 for none. */
  13: optional i64 after_step,
  /**
   * Tables to drop, with their rows; those that do not exist are skipped. Only an ADMIN may, with rank and world size 0 and no
   * `tables`; a trainer drops dense tensors of its run alone. Clients of earlier epochs cannot make such a table again:
   * UNKNOWN_TABLE.
   */
  14: optional list<string> dropped_tables,
  /** Where a node of a cluster knows its server's shards to be; the shard takes what has a higher term. Only an ADMIN may. */
  16: optional list<ShardAddress> shards,
  /** From a client that is no trainer: those of `tables` that it made, with `fills`, in this epoch, and has brought in whole. */
  17: optional list<string> complete,
  /**
   * With epoch 0: this client reads the `shards` of a standby's reply, whose `shard` is -1. Without it a standby refuses
   * whoever is no ADMIN.
   */
  18: optional bool asks_places,
  /**
   * Those of `tables` of which this trainer sends updated rows only. One that is new, grows or lacks rows lacks them until a
   * trainer names it in `fills`. No effect on a complete one, or from a client that is no trainer.
   */
  21: optional list<string> updated_only,
  /**
   * This client, which is no trainer, owns `tables` as a trainer does: a backfill. OWNED if a trainer owns one and has not ended,
   * if another backfill that is connected does, or if another run has owned one since this run began.
   */
  22: optional bool claims_tables,
  /**
   * This client writes no more in this epoch. Once all ranks have said so the run has ended, and others may take its tables. A
   * client says it to shard 0 last, which decides.
   */
  23: optional bool ends_run,
  /** Only check whether the hello would be accepted: nothing is registered, and no session is opened or fenced. */
  24: optional bool checks_only,
  /** From a reader: a copy of the shard that follows its owner will do. Without it a standby sends readers to the owner. */
  25: optional bool reads_copies,
}

/** The run that may write a table: the trainer or backfill that named the table in its hello last. */
struct TableOwner {
  1: required string fqn,
  2: required string run,
  /** The epoch in which the run named the table first. */
  3: required i64 epoch,
  /** The run is a backfill, from which others take the table without `takes_over`. */
  4: optional bool is_backfill,
  /** The run writes no more: others take the table without `takes_over`. */
  5: optional bool has_ended,
  /** Run and epoch of the last trainer that owned the table before. Its steps are those of the table until another trainer has begun. */
  6: optional string former_run,
  7: optional i64 former_epoch,
}

/** A server with another number of shards, whose place a server has taken. */
struct Predecessor {
  1: required string server_id,
  /** Of each of its shards, the record of the offer that was accepted: all before it was taken over. */
  2: required list<i64> seqs,
}

struct HelloReply {
  1: required i32 protocol_version,
  /** Identity of the data directory; another value means another store. */
  2: required string server_id,
  3: required i32 shard,
  4: required list<ShardAddress> shards,
  5: required Limits limits,
  /** Highest epoch that this shard has seen, of any run. */
  6: required i64 highest_epoch,
  /** Last durable client seq of (run, client, epoch); 0 if there is none. */
  7: required i64 last_client_seq,
  8: required list<TableSpec> tables,
  /** Owners of `tables`; a table that no trainer or backfill has named has none. */
  9: optional list<TableOwner> owners,
  /** Those of `tables` whose trainer has not sent all rows to this shard yet. Absent from a server that knows none. */
  10: optional list<string> filling,
  /**
   * The term in which this shard runs; absent where nobody claims shards. It is in every reply of such a shard. A client
   * that has seen a higher one of the same shard talks to an old copy, and takes nothing from it.
   */
  11: optional i64 term,
  /**
   * From a follower: how long ago it heard from the shard that takes the updates, milliseconds, over all followers between.
   */
  12: optional i64 knowledge_age_ms,
  /**
   * The server may lack what it has acked: it was promoted without its source, or it archives its log, from which a lost shard
   * comes back. A trainer sends the shard's rows again then.
   */
  13: optional bool may_be_set_back,
  /** The shard's clock as it replies, microseconds since 1970. */
  14: optional i64 time_us,
  /**
   * Where else shards may be found once their owners are lost. Who talks to a standby before that is told UNAVAILABLE; only an
   * ADMIN gets a reply, with shard -1, and the places that the standby knows of.
   */
  15: optional list<ShardAddress> standbys,
  /** Those of `tables` that lack rows because their trainer sends updated ones only. */
  18: optional list<string> updated_only,
  /** The servers whose place this one has taken, the latest first: what they had up to these positions is here. */
  20: optional list<Predecessor> predecessors,
  /** One for each of `filling`: only rows from this one on are lacking, or 0. Absent if all are 0. */
  19: optional list<i64> filling_from_rows,
}

/** `num_rows × width` elements of one optimizer state. */
struct StateColumn {
  1: required string name,
  2: required DType dtype,
  3: required i32 width,
  4: required binary data,
}

/** A value of a table, not of a row, such as an optimizer's `iter`. */
struct TableScalar {
  1: required string name,
  2: required DType dtype,
  3: required binary data,
}

/** New values for rows of one table, or of one column shard of it. */
struct TableDelta {
  1: required string fqn,
  /** The `TableSpec`'s fingerprint: the shard refuses values with another table's layout. */
  2: required i64 fingerprint,
  /** First column that `weights` holds. */
  3: required i32 column_offset,
  /** Columns that `weights` holds: the table's dim if it is not split by columns. */
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
  /** This client has now sent everything that it has for this shard up to `step`. */
  7: required bool ends_step,
  /** With `ends_step`: no value newer than `step` was sent, so the shard's copy is the cut at `step`. */
  8: required bool is_exact_cut,
  9: required list<TableDelta> deltas,
  /**
   * With `ends_step`: what streaming has lately taken of the steps' time, percent, as the trainer estimates it. The shard only
   * shows it in its status.
   */
  11: optional double cost_percent,
  /** With `cost_percent`: the trainer's last flush was later than `freshness_s` wants, because of `max_cost_percent`. */
  12: optional bool is_cost_bound,
  /**
   * Trainer's wall clock at the oldest update whose rows this message may hold, or that the step which it ends covers;
   * microseconds since 1970, at most `time_us`. Absent: `time_us`.
   */
  13: optional i64 oldest_us,
  /** With `is_exact_cut`: the trainer has recorded what the model answers at `step`, for replicas to compare. Shards ignore it. */
  14: optional bool is_recorded,
  /** With `ends_step`: tables and modules that the trainer trains and does not stream. The shard only shows it in its status. */
  15: optional i32 num_unstreamed,
}

struct SetEmbeddingsReply {
  /** Position in the shard's update log. */
  1: required i64 seq,
  /** The batch was already durable; nothing changed. */
  2: required bool is_duplicate,
  3: optional i64 term,
}

/** A request for rows of one more table. */
struct RowsWanted {
  1: required string fqn,
  /** int64[n] */
  2: required binary row_ids,
}

struct GetEmbeddingsRequest {
  1: required string fqn,
  /** int64[n] */
  2: required binary row_ids,
  3: required bool with_states,
  4: required bool with_versions,
  /** Requests the same of further tables. A server that does not know this field answers without `more`. */
  5: optional list<RowsWanted> more,
}

/** Rows of one more table, with the fields of `GetEmbeddingsReply`. */
struct RowsFound {
  1: required binary presence,
  2: required binary weights,
  3: required list<StateColumn> states,
  4: optional binary epochs,
  5: optional binary steps,
  6: optional binary times_us,
  7: optional binary identities,
}

struct GetEmbeddingsReply {
  /** uint8[n], `RowPresence`. */
  1: required binary presence,
  /** dtype[n, dim]; zeros where the row is not present. */
  2: required binary weights,
  3: required list<StateColumn> states,
  /** int64[n], if versions were requested; 0 where missing. */
  4: optional binary epochs,
  5: optional binary steps,
  6: optional binary times_us,
  /** int64[n], if the table has identities. */
  7: optional binary identities,
  /** Every batch acked up to this seq is in the answer. */
  8: required i64 seq,
  /** For `more` of the request, in its order, all as of the same moment. */
  9: optional list<RowsFound> more,
  10: optional i64 term,
}

struct FindRowsRequest {
  /** A table with identities. */
  1: required string fqn,
  /** int64[n]: raw ids, any value; -1 stands for none. */
  2: required binary identities,
}

struct FindRowsReply {
  /** int64[n]: the row that has the identity; -1 if none has. */
  1: required binary row_ids,
  /** Every batch acked up to this seq is in the answer. */
  2: required i64 seq,
}

/** A table's scalar as this shard has it; the shard with the newest (epoch, step) has the newest value. */
struct StoredScalar {
  1: required TableScalar scalar,
  2: required i64 epoch,
  3: required i64 step,
}

/** Of a table that lacks rows on this shard. It lacks none once all ranks of `epoch` have ended a step after `after_step`. */
struct Filling {
  1: required i64 epoch,
  2: required i64 after_step,
  /** Only rows from this one on are lacking; absent for all. */
  3: optional i64 from_row,
  /** The trainer sends updated rows only: the table lacks rows until a trainer sends all. */
  4: optional bool updated_only,
}

struct TableStatus {
  1: required TableSpec spec,
  /** RocksDB's estimate: overwritten rows may count more than once. */
  2: required i64 num_rows_estimate,
  3: optional list<StoredScalar> scalars,
  /** Absent until a trainer names the table. */
  4: optional TableOwner owner,
  /** Fingerprints that the table had before it got more rows; records of the log may have them. Absent if it has none. */
  5: optional list<i64> earlier_fingerprints,
  /** Absent if the table lacks no rows, as far as its trainers have said. */
  6: optional Filling filling,
  /** Rows of the table were deleted: nothing tells which of those that are not there. */
  7: optional bool has_deletes,
}

struct ClientStatus {
  1: required string run,
  2: required string client,
  3: required i64 epoch,
  4: required i64 last_client_seq,
  /** Last step that the client ended; -1 before the first. */
  5: required i64 step,
  6: required bool is_connected,
  7: optional i32 rank,
  8: optional i32 world_size,
  /** Last step whose cut was exact; -1 before the first. */
  9: optional i64 exact_step,
  /** The batch that ended `step`; 0 before the first. */
  10: optional i64 ended_client_seq,
  /** The trainer's clock at `step`, microseconds since 1970; it distinguishes two ends of one step. */
  11: optional i64 time_us,
  /** What a connected trainer has last said of streaming's cost with the end of a step; absent if nothing. */
  12: optional double cost_percent,
  13: optional bool is_cost_bound,
  /**
   * Every update of this trainer that is older than this, in seconds, is durable here, by its clock and the shard's; it grows while
   * no step ends. Absent before the first, and from clients that are no trainers.
   */
  14: optional double age_s,
  /** Tables and modules that a connected trainer trains and does not stream, as it has said with the end of a step. */
  15: optional i32 num_unstreamed,
  /** Whether the client writes no more in its epoch; absent if it may. */
  16: optional bool has_ended,
}

/** How far a replica is behind one shard of its server. */
struct ReplicaShardStatus {
  1: required i32 shard,
  /** Last seq of the shard's log that reads of the replica see. */
  2: required i64 visible_seq,
  /** Last durable seq that the shard has reported. */
  3: required i64 last_seq,
  /** Steps that have arrived from the shard and are not visible. */
  4: required i64 lag_steps,
  /**
   * From a record's oldest update, by the trainer's clock, until the record is visible; over all since the replica began, absent
   * before the first.
   */
  5: optional double delay_p50_s,
  6: optional double delay_p99_s,
  /** Every update that is older than this, in seconds, is visible; it grows while no step ends. Absent while unknown. */
  7: optional double age_s,
}

/** The result of a replica's last audit, which compares its rows with the server's. */
struct ReplicaAudit {
  /** When rows were last compared, microseconds since 1970; 0 before the first time. */
  1: required i64 ended_us,
  2: required i64 num_rows,
  /** Buckets of 65536 rows that differed. */
  3: required i64 num_differing_buckets,
  /** Which tables differed, and how; absent if none did. */
  4: optional string difference,
  /** Why rows could not be compared since; absent if they could. */
  5: optional string failure,
  /** Tables that were skipped, or compared only in part. */
  6: required i32 num_left_out,
}

/** A replica's state; absent from a shard of the server. */
struct ReplicaStatus {
  /** It accepts reads: it is up to date, or behind by less than its limit. */
  1: required bool is_ready,
  /** How long it has known the oldest update that is not visible, seconds; 0 if there is none. */
  2: required double lag_s,
  3: required i64 lag_steps,
  /** Run and step up to which everything is visible; 0 and -1 before the first. */
  4: required i64 visible_epoch,
  5: required i64 visible_step,
  6: required list<ReplicaShardStatus> shards,
  /** Why it is not ready, or not kept up to date; absent if all is well. */
  7: optional string failure,
  /** Absent if it does not audit itself. */
  8: optional ReplicaAudit audit,
}

/** A shard's expiry passes since its process began. */
struct ExpiryStatus {
  /** A pass is running, and has looked at `scanned` rows. */
  1: required bool is_running,
  2: required i64 scanned,
  /** Passes that have ended, except dry ones; rows that they scanned and deleted; how many of them failed. */
  3: required i64 num_runs,
  4: required i64 num_rows_scanned,
  5: required i64 num_rows_expired,
  6: required i64 num_failed,
  /** When the last of them ended, microseconds since 1970; 0 before the first. */
  7: required i64 last_run_us,
}

/** A shard's last upload of its part of a snapshot to the server's object store. */
struct UploadStatus {
  /** Of the object store. */
  1: required string url,
  /** Of the snapshot; empty before the first. */
  2: required string name,
  3: required bool is_running,
  4: required i64 size_bytes,
  /** In files that are known to be in the store. */
  5: required i64 done_bytes,
  /** In files that were sent; the others were there. */
  6: required i64 sent_bytes,
  /** Why it failed. */
  7: optional string failure,
}

/** How far the archive of a shard's log is, in the object store. */
struct ArchiveStatus {
  /** All records up to here are archived; -1 while the store has not told yet. */
  1: required i64 archived_seq,
  /** About how many bytes of durable log are not archived. */
  2: required i64 behind_bytes,
  /** How long the oldest of these records has been durable, seconds. */
  3: required double behind_s,
  /** Uploads and listings that have failed since the start. */
  4: required i64 num_failures,
  /** Records that were removed before they were archived. */
  5: required i64 num_lost,
  /** The present failure; absent while all is well. */
  6: optional string error,
  /** How long a record waits at most until its part is archived, seconds. */
  7: optional double segment_s,
}

/** A standby of a shard, as its owner sees it. */
struct StandbyStatus {
  /** Host and port. */
  1: required string address,
  /** Last seq that is in its store; -1 before it has told. */
  2: required i64 applied_seq,
  /** Why it does not answer; absent if it does. */
  3: optional string failure,
}

/** Appends that the servers of a replicated log refused for one reason. */
struct LogRefusals {
  1: required string reason,
  2: required i64 count,
}

/** A shard's replicated log. Counts are since the process began. */
struct LogStatus {
  /** Whether this process owns the log; otherwise it is a standby. */
  1: required bool is_owner,
  /** Address that the owner has given; empty before the first. */
  2: required string owner,
  /** Name of the server that leads the stream; absent while there is none. */
  3: optional string leader,
  /** Messages that the replica which is behind most lacks; absent while no server tells. */
  4: optional i64 peer_lag,
  /** Replicas of the stream that are away. */
  5: optional i32 peers_away,
  /** Bytes of records that are sent and not acked. */
  6: required i64 outstanding_bytes,
  /** For how long the oldest of them has not been acked, seconds, in all such pauses. */
  7: required double stalled_s,
  8: required list<LogRefusals> refusals,
  /** Records of an earlier owner that do not count. */
  9: required i64 num_voids,
  /** Changes of the stream's leader. */
  10: required i64 num_elections,
  11: optional i64 stream_bytes,
  12: optional i64 stream_max_bytes,
  13: required list<StandbyStatus> standbys,
  /** The servers have no room for what waits. */
  14: required bool is_full,
}

/** How far a follower is behind the shard that it follows. */
struct FollowingStatus {
  /** The shard that it follows: host and port. */
  1: required string source,
  /** Last durable seq that the source has reported; `log_seq` is the follower's own. */
  2: required i64 source_seq,
  /** How long the follower has lacked a record that it knows of, milliseconds; 0 if it lacks none. */
  3: required i64 lag_ms,
  /** How long ago it heard from the shard that takes the updates, milliseconds, over all followers between. */
  4: required i64 knowledge_age_ms,
  /** Why it does not follow at present; absent while it does. */
  5: optional string failure,
  /** How often it has begun anew since its process began, because the source lacked what comes next. */
  6: required i32 num_restarts,
}

/** A follower of a shard's log, or a standby: how far it is behind. */
struct FollowerStatus {
  /** What it calls itself, such as a replica's name, `follower` or `standby`; empty if it does not say. */
  1: required string name,
  /** Host and port from which it is connected; of a standby, where it listens. */
  2: required string address,
  /** Durable records that it has not asked beyond; 0 if it is current. */
  3: required i64 records_behind,
  /** Since the oldest update in the first of them, by the trainer's clock, seconds; absent if it is current or not known. */
  4: optional double age_s,
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
  /** Longest pause of the shard's event loop in the last minute, milliseconds. */
  15: optional double worst_loop_pause_ms,
  /** Last seq that was assigned, durable or not; `clients` is the state after it. */
  16: optional i64 accepted_seq,
  /** From a replica, which answers as one shard; its `log_seq` and `applied_seq` are the lowest of its shards'. */
  17: optional ReplicaStatus replica,
  18: optional ExpiryStatus expiry,
  19: optional i64 term,
  20: optional ArchiveStatus archive,
  /** From a follower; it judges no expiry. */
  21: optional FollowingStatus following,
  /** From a server with an object store. */
  22: optional UploadStatus upload,
  /** From a server with a replicated log, its standbys included. */
  23: optional LogStatus log,
  /** Since the last refusal, milliseconds; absent without one. */
  28: optional i64 refused_ago_ms,
  /** Why updates are refused at present, such as a disk without room; absent while they are taken. */
  29: optional string updates_refusal,
  /** Those that are connected, the 1024 furthest behind; of a shard or a follower. */
  30: optional list<FollowerStatus> followers,
}

struct FetchUpdatesRequest {
  /** `server_id` of the hello, because seqs of another store mean nothing here. */
  1: required string server_id,
  /** First seq wanted, 1 or more. */
  2: required i64 from_seq,
  /** Bytes of records in the reply, about; the shard may send less. */
  3: required i64 max_bytes,
  /** How long to wait for such a record, milliseconds; the shard may answer sooner, without one. */
  4: required i32 wait_ms,
  /** Name of a follower for which records from `from_seq` on are kept, within the server's limit; none are without it. */
  5: optional string follower,
  /** How long they are kept after this call, milliseconds. */
  6: optional i64 lease_ms,
  /** Where to continue in the body of record `from_seq`, whose first part was sent before. */
  7: optional i64 body_offset,
  /** Distinguishes followers of one name, such as copies of one replica; each has its own lease. */
  8: optional string copy_id,
}

/** One record of the update log. */
struct UpdateRecord {
  1: required i64 seq,
  2: required i64 epoch,
  3: required UpdateKind kind,
  /** The record's header in the log: a msgpack map. */
  4: required binary header,
  5: required binary body,
  /** Length of the whole body; present if `body` is only a part of it. */
  6: optional i64 body_size_bytes,
}

struct FetchUpdatesReply {
  /** In order, without gaps, from `from_seq` on; empty if there was none in time. */
  1: required list<UpdateRecord> records,
  /** Oldest seq that can be requested. */
  2: required i64 first_seq,
  /** Last seq that is durable. */
  3: required i64 last_seq,
  /**
   * Nonce of the segment that has the record before `from_seq`; absent if the log does not have that record. If it differs
   * from the `mark` that came with that record, the server was set back to an older copy of itself, and the follower has
   * other records than the server.
   */
  4: optional i64 mark_before,
  /** Nonce of the one segment that has all of `records`, which each start of the server draws anew; absent without records. */
  5: optional i64 mark,
  6: optional i64 term,
  /** From a follower, as in its hello. */
  7: optional i64 knowledge_age_ms,
}

/** A file of a snapshot in an object store. */
struct StoredFile {
  /** In the snapshot, such as `shard-0000/000012.sst`. */
  1: required string path,
  /** The object that has its bytes, below the store's prefix. */
  2: required string object_path,
}

struct CreateSnapshotRequest {
  /** Letters, digits, `.`, `_` and `-`; the same for every shard. */
  1: required string name,
  /** Epoch of the run whose consistent cut is taken; 0 for a cut at no step, now. */
  2: required i64 epoch,
  /** The cut is at the run's first exact step that is not below this one. */
  3: required i64 min_step,
  /** Fail with UNAVAILABLE if the run does not reach such a step in this time, milliseconds. */
  4: required i32 wait_ms,
  /** Put the part that the shard has made last, under this name, into the server's object store; make none. */
  5: optional bool uploads,
}

struct CreateSnapshotReply {
  /** JSON: this shard's part of the manifest. */
  1: required string part,
  /** With `uploads`: all files of the part. */
  2: optional list<StoredFile> files,
}

struct FinishSnapshotRequest {
  1: required string name,
  /** Publish with this manifest, JSON; without one, remove what the shards have made. */
  2: optional string manifest,
  /** Remove the published snapshot of that name instead. */
  3: optional bool removes,
  /** With a manifest: publish in the server's object store, with the files of all parts; on no disk. */
  4: optional list<StoredFile> files,
}

struct FinishSnapshotReply {
  1: required string name,
}

struct FetchSnapshotRequest {
  /** Empty for the newest. */
  1: required string name,
  /** A file of the manifest, such as `shard-0000/000012.sst`; empty for the manifest itself. */
  2: required string path,
  3: required i64 offset,
  /** Bytes in the reply, about; the shard may send less. */
  4: required i64 max_bytes,
}

struct FetchSnapshotReply {
  1: required string name,
  2: required binary data,
  /** Size of the whole file. */
  3: required i64 size_bytes,
  4: optional i64 term,
}

struct DigestRowsRequest {
  1: required string fqn,
  /** First row of the range. */
  2: required i64 first_row,
  /** End of the range, exclusive; limited by the table's end, or 2^63 - 1. */
  3: required i64 end_row,
  /** Columns of weights and pointwise states; rowwise states count only with all columns. */
  4: required i32 column_offset,
  5: required i32 width,
  /** Limit for the buckets in the reply; the shard may send fewer. */
  6: required i32 max_buckets,
  /** Include which rows are present. */
  7: required bool with_presence,
  /** Digest only weights, which a replica has too, and no states. */
  8: optional bool only_weights,
}

/** Digests, defined in schemas/row_digest.py, of the present rows. */
struct DigestRowsReply {
  /** int64[m]: row id / 65536, ascending, of buckets that have rows here. */
  1: required binary buckets,
  /** uint64[m]: sum of the rows' digests. */
  2: required binary digests,
  /** int64[m]: number of rows. */
  3: required binary counts,
  /** uint8[m][8192], if requested: one bit per row, lowest first. */
  4: optional binary presence,
  /** First row that is not included; `end_row` or more at the end. */
  5: required i64 next_row,
  /** The digests include all acked batches up to this seq, and none beyond. A replica sends the sum of its shards' seqs. */
  6: required i64 seq,
  7: optional i64 term,
}

struct ExpireRowsRequest {
  /** Tables: a name, or a pattern with `*`, `?` or `[…]`; empty for all tables with a policy. */
  1: required string fqn,
  /** Count what would be deleted, and delete nothing. */
  2: required bool is_dry_run,
  /** How long to wait for the end of the pass, milliseconds, at most a minute; the reply says whether it ended. */
  3: required i32 wait_ms,
  /** Report on this pass instead of beginning one. */
  4: optional i64 run_number,
  /** Use this policy, such as `ttl_s=7d, max_rows=1000000`, instead of the server's. */
  5: optional string policy,
}

/** Number of rows that one policy of a table selects; several policies may select the same row. */
struct PolicyCount {
  1: required string policy,
  2: required i64 num_rows,
}

struct TableExpiry {
  1: required string fqn,
  /** Rows of this shard that were scanned. */
  2: required i64 scanned,
  /** Rows that were present. */
  3: required i64 live,
  /** Rows that were deleted, or would be in a dry pass. */
  4: required i64 expired,
  5: required list<PolicyCount> by_policy,
  /** Why no row can expire. */
  6: optional string note,
}

struct ExpireRowsReply {
  /** Number of the pass, to request a report on it. */
  1: required i64 run_number,
  2: required bool is_done,
  /** So far, or in total. */
  3: required i64 scanned,
  4: required i64 expired,
  /** Finished tables. */
  5: required list<TableExpiry> tables,
  /** Why the pass stopped early. */
  6: optional string error,
}

/** What has become of an offer of a shard. */
enum OfferState {
  /** Nothing yet. */
  OPEN = 1,
  /** The follower takes the shard's updates, for ever. */
  ACCEPTED = 2,
  /** It never will by this offer. */
  DECLINED = 3,
}

struct PromoteShardRequest {
  1: required i32 shard,
  /**
   * To the owner: host and port of the follower or standby that is to take over. With `offer`, to that follower: the offer may be
   * about to be made, and the owner answers no rows because it is open.
   */
  2: optional string to,
  /** With `to`: how long the owner waits for that, milliseconds. It takes nothing meanwhile, and goes on if it may. */
  3: optional i32 hold_ms,
  /** From the owner to a follower: which of its offers is meant. */
  4: optional string offer,
  /** With `offer`: decline it for good, unless it is accepted. */
  5: optional bool declines,
  /** To a follower: take over without an offer, because its source is gone. To the owner with `aborts`: see there. */
  6: optional bool forces,
  /**
   * To the owner: go on, unless its offer is accepted. With `forces` it goes on if the follower does not answer. With `to` the
   * follower at that address says so itself: it has accepted nothing.
   */
  7: optional bool aborts,
  /** With `to`: that is a new server with so many shards, which takes the place of this whole one. */
  8: optional i32 shards,
}

struct PromoteShardReply {
  /** Of the record in the log by which the owner offers the shard. */
  1: optional i64 seq,
  /** The term of who replies. */
  2: optional i64 term,
  /** To an owner's question. */
  3: optional OfferState state,
  /** By which the owner has offered the shard. */
  4: optional string offer,
}

service ParameterServer {
  /** First call on a connection: registers tables, resumes a client, returns limits and the shard map. */
  HelloReply hello(1: HelloRequest request) throws (1: ServerError error),
  /** Answered when the batch is durable. */
  SetEmbeddingsReply setEmbeddings(1: SetEmbeddingsRequest request) throws (1: ServerError error),
  /** Reflects every acked batch. */
  GetEmbeddingsReply getEmbeddings(1: GetEmbeddingsRequest request) throws (1: ServerError error),
  StatusReply status() throws (1: ServerError error),
  /**
   * Waits for and returns durable records of the update log. GONE if they were removed, never existed, or belong to another
   * store: then the follower has to start over.
   */
  FetchUpdatesReply fetchUpdates(1: FetchUpdatesRequest request) throws (1: ServerError error),
  /** Makes one shard's part of a snapshot, without publishing it. */
  CreateSnapshotReply createSnapshot(1: CreateSnapshotRequest request) throws (1: ServerError error),
  /** Publishes a snapshot of all shards, or drops it; any shard can do it. */
  FinishSnapshotReply finishSnapshot(1: FinishSnapshotRequest request) throws (1: ServerError error),
  /** Reads a piece of a published snapshot, which any shard can do. GONE if it was removed. */
  FetchSnapshotReply fetchSnapshot(1: FetchSnapshotRequest request) throws (1: ServerError error),
  /** Sums digests of rows as of one position of the log. */
  DigestRowsReply digestRows(1: DigestRowsRequest request) throws (1: ServerError error),
  /**
   * Begins an expiry pass, or reports on one. OVERLOADED while another pass runs, GONE if the shard does not know the
   * pass.
   */
  ExpireRowsReply expireRows(1: ExpireRowsRequest request) throws (1: ServerError error),
  /** Returns which rows of a replica have identities. BAD_REQUEST for a table without identities. Shards do not know it. */
  FindRowsReply findRows(1: FindRowsRequest request) throws (1: ServerError error),
  /**
   * Hands a shard over: its owner offers it in the log, and the follower or standby takes over as soon as it has read so. Also
   * asks what has become of that.
   */
  PromoteShardReply promoteShard(1: PromoteShardRequest request) throws (1: ServerError error),
}
