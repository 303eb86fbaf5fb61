/**
 * Reads embedding rows by id from a Headrace server or from a `headrace replica`, with the code that Thrift generates.
 *
 *     apt-get install thrift-compiler                          # of Debian 12: 0.17
 *     npm install --no-package-lock --prefix examples/node     # Thrift 0.23: 0.24 no longer fits what 0.17 generates
 *     thrift --gen js:node -out examples/node schemas/paramserver.thrift
 *     node examples/node/headrace.js 127.0.0.1:7601 user.weight 3 5 8
 *
 * It prints one line a row: the id, and its weights, or `missing`. As a module:
 *
 *     const { Reader } = require("./headrace");
 *     const reader = await Reader.connect("127.0.0.1:7601"); // of any shard, or of a replica
 *     const { weights, dim, isPresent } = await reader.get("user.weight", [3, 5, 8n]);
 *     reader.close();
 *
 * Tables have their full names, as `headrace table list` shows them. A call that fails rejects with the server's error,
 * which has a `code` and a `message`; the next call connects anew. For machines that are little-endian.
 */
"use strict";

const net = require("node:net");

const thrift = require("thrift");
const ParameterServer = require("./ParameterServer");
const { DType, ErrorCode, GetEmbeddingsRequest, HelloRequest, PROTOCOL_VERSION, Role } = require("./paramserver_types");

const MOST_RETRIES = 8; // how often a read asks a shard again that is away, after 10, 20, 40 … ms
const MASK = (1n << 64n) - 1n;

/** Return FNV-1a 64 of a table's name, a BigInt. */
function tableSeed(fqn) {
  let seed = 0xcbf29ce484222325n;
  for (const byte of Buffer.from(fqn)) seed = ((seed ^ BigInt(byte)) * 0x100000001b3n) & MASK;
  return seed;
}

/** Return the hash by which a row is routed, a BigInt: splitmix64 of the row id xor the table's seed. */
function hashOfRow(seed, rowId) {
  let value = (BigInt.asUintN(64, rowId) ^ seed) + 0x9e3779b97f4a7c15n & MASK;
  value = ((value ^ (value >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  value = ((value ^ (value >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return value ^ (value >> 31n);
}

function halfToFloat(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 25) * (1024 + fraction) : fraction * 2 ** -24;
  return bits >> 15 ? -size : size;
}

function isLoopback(host) {
  return host === "localhost" || host === "::1" || (net.isIPv4(host) && host.startsWith("127."));
}

// The element types of embedding tables: bytes of one element, and how a column becomes numbers.
const TYPES = {
  [DType.FLOAT32]: [4, (buffer) => new Float32Array(buffer)],
  [DType.FLOAT64]: [8, (buffer) => new Float64Array(buffer)],
  [DType.FLOAT16]: [2, (buffer) => Float32Array.from(new Uint16Array(buffer), halfToFloat)],
  [DType.BFLOAT16]: [2, (buffer) => new Float32Array(Uint32Array.from(new Uint16Array(buffer), (bits) => bits << 16).buffer)],
};

class Reader {
  /**
   * Find the shards and tables of a server, or of a replica, which is one shard.
   *
   * Options: `token`; `tls`, options of Node's `tls.connect` such as `ca`; `timeoutMs` of each call, 10,000 by default;
   * `insecureToken`, without which the token is shown over TLS, or to this machine, alone.
   */
  static async connect(address, options = {}) {
    const [, host, port] = /^\[?(.*?)\]?:(\d+)$/.exec(address) ?? [];
    if (port === undefined) throw new Error(`address ${JSON.stringify(address)} is not HOST:PORT`);
    const reader = new Reader(host, Number(port), options);
    await reader.refresh();
    return reader;
  }

  constructor(host, port, options) {
    this._seed = { host, port };
    this._options = { timeoutMs: 10_000, ...options };
    this._connections = new Map(); // by host:port
    this._shards = new Map(); // address by number
    this.tables = new Map(); // TableSpec by name, as of the last `refresh`
  }

  /** Ask again for shards and tables. */
  async refresh() {
    const { call } = await this._connected(this._seed);
    const hello = await call((client) => client.hello(this._greeting()));
    this.tables = new Map(hello.tables.map((table) => [table.fqn, table]));
    this._limits = hello.limits;
    this._learn(hello.shards);
  }

  /**
   * Read rows of a table; ids are numbers or BigInts, in any order.
   *
   * Returns `weights`, a Float32Array (Float64Array of a float64 table) of ids × dim, zeros where a row is missing; `dim`;
   * and `isPresent`, a boolean for each id. Rows of several shards may be of different moments.
   */
  async get(fqn, ids) {
    if (!this.tables.has(fqn)) await this.refresh(); // it may be new
    const table = this.tables.get(fqn);
    if (table === undefined) throw new Error(`no table ${fqn} here; there are ${[...this.tables.keys()].join(", ") || "none"}`);
    if (!TYPES[table.dtype]) throw new Error(`table ${fqn} has elements of type ${table.dtype}, which is not read here`);
    const [size, decode] = TYPES[table.dtype];
    const rowIds = BigInt64Array.from(ids, BigInt);
    const found = { bytes: new Uint8Array(rowIds.length * table.dim * size), isPresent: new Array(rowIds.length).fill(false) };
    let left = [...rowIds.keys()];
    for (let attempt = 0; left.length; attempt++) {
      if (attempt) await new Promise((done) => setTimeout(done, 5 << attempt));
      const parts = this._routed(table, rowIds, left);
      const done = await Promise.all(parts.map((part) => this._read(table, rowIds, part, found, attempt < MOST_RETRIES)));
      left = parts.filter((_, part) => !done[part]).flatMap((part) => part.places);
    }
    return { weights: decode(found.bytes.buffer), dim: table.dim, isPresent: found.isPresent };
  }

  /** Close all connections; calls under way reject. */
  close() {
    for (const connection of this._connections.values()) connection.close();
    this._connections.clear();
  }

  /** Return requests {shard, places}, each of one shard and below half a frame. */
  _routed(table, rowIds, places) {
    const seed = tableSeed(table.fqn);
    const numbers = [...this._shards.keys()].sort((a, b) => a - b);
    const placesOf = new Map();
    for (const place of places) {
      const shard = numbers.length === 1 ? numbers[0] : numbers[Number(hashOfRow(seed, rowIds[place]) % BigInt(numbers.length))];
      if (!placesOf.has(shard)) placesOf.set(shard, []);
      placesOf.get(shard).push(place);
    }
    const rowBytes = 16 + table.dim * TYPES[table.dtype][0];
    const most = Math.max(1, Math.floor(Number(this._limits.max_frame_bytes) / 2 / rowBytes));
    const parts = [];
    for (const [shard, all] of placesOf) {
      for (let at = 0; at < all.length; at += most) parts.push({ shard, places: all.slice(at, at + most) });
    }
    return parts;
  }

  /** Read rows of one shard into `found`; return false if it is away, and may be asked again. */
  async _read(table, rowIds, { shard, places }, found, mayRetry) {
    const wanted = BigInt64Array.from(places, (place) => rowIds[place]);
    const request = new GetEmbeddingsRequest({
      fqn: table.fqn, row_ids: Buffer.from(wanted.buffer), with_states: false, with_versions: false,
    });
    let reply;
    try {
      const { call } = await this._connected(this._shards.get(shard));
      reply = await call((client) => client.getEmbeddings(request));
    } catch (error) {
      if (error.code !== ErrorCode.UNAVAILABLE || !mayRetry) throw error;
      this._learn(error.shards ?? []);
      return false;
    }
    const rowBytes = reply.weights.length / places.length;
    places.forEach((place, index) => {
      found.isPresent[place] = reply.presence[index] === 1;
      found.bytes.set(reply.weights.subarray(index * rowBytes, (index + 1) * rowBytes), place * rowBytes);
    });
    return true;
  }

  /** Take addresses of shards that are as new, by their terms. */
  _learn(shards) {
    for (const each of shards) {
      const [term, known] = [toBigInt(each.term ?? 0), this._shards.get(each.shard)];
      if (known === undefined || term >= known.term) this._shards.set(each.shard, { host: each.host, port: each.port, term });
    }
  }

  /** Return the connection to an address, greeted. */
  async _connected({ host, port }) {
    const key = `${host}:${port}`;
    let connection = this._connections.get(key);
    if (connection === undefined) {
      const { token, tls, insecureToken } = this._options;
      if (token != null && !tls && !insecureToken && !isLoopback(host)) {
        throw new Error(`the token is not sent to ${key} without TLS, where others could read it: set tls, or insecureToken`);
      }
      connection = new Connection(host, port, this._options);
      this._connections.set(key, connection);
      connection.onEnd = () => this._connections.get(key) === connection && this._connections.delete(key);
    }
    try {
      await (connection.greeting ??= connection.call((client) => client.hello(this._greeting())));
    } catch (error) {
      connection.close();
      throw error;
    }
    return connection;
  }

  _greeting() {
    return new HelloRequest({
      protocol_version: PROTOCOL_VERSION, role: Role.READER, run: "", client: "", epoch: 0, rank: 0, world_size: 1, tables: [],
      token: this._options.token ?? null, asks_places: true,
    });
  }
}

/** A connection whose calls end: with a reply, an error, a lost connection or after `timeoutMs`. */
class Connection {
  constructor(host, port, { timeoutMs, tls }) {
    // Without `max_attempts`: the library would connect again by itself, and say no hello.
    const options = { transport: thrift.TFramedTransport, protocol: thrift.TBinaryProtocol, ...tls };
    this._thrift = tls ? thrift.createSSLConnection(host, port, options) : thrift.createConnection(host, port, options);
    this._client = thrift.createClient(ParameterServer, this._thrift);
    [this._where, this._timeoutMs, this.onEnd] = [`${host}:${port}`, timeoutMs, () => {}];
    this._lost = new Promise((_, reject) => (this._end = reject));
    this._lost.catch(() => this.onEnd()); // told by whichever call is under way
    for (const event of ["error", "close", "timeout"]) {
      this._thrift.on(event, (cause) => this._end(new Error(`${this._where}: ${cause?.message || "the connection is lost"}`)));
    }
    this.call = this.call.bind(this);
  }

  async call(method) {
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => {
        reject(new Error(`${this._where}: no answer within ${this._timeoutMs} ms`));
        this.close();
      }, this._timeoutMs);
    });
    try {
      return await Promise.race([method(this._client), this._lost, late]);
    } finally {
      clearTimeout(timer);
    }
  }

  close() {
    this._end(new Error(`${this._where}: closed`));
    this._thrift.end();
  }
}

function toBigInt(value) {
  return typeof value === "object" ? BigInt.asIntN(64, BigInt(`0x${value.toOctetString()}`)) : BigInt(value);
}

async function main([address, fqn, ...ids]) {
  if (ids.length === 0) throw new Error("usage: node headrace.js HOST:PORT TABLE ID...");
  const reader = await Reader.connect(address);
  try {
    const { weights, dim, isPresent } = await reader.get(fqn, ids);
    ids.forEach((id, row) => console.log(id, isPresent[row] ? [...weights.slice(row * dim, (row + 1) * dim)].join(" ") : "missing"));
  } finally {
    reader.close();
  }
}

module.exports = { Reader, hashOfRow, tableSeed };
if (require.main === module) {
  main(process.argv.slice(2)).catch((error) => {
    console.error(`error: ${error.message}`);
    process.exitCode = 1;
  });
}
