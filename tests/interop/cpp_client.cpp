// A C++ client with nothing of Headrace's but its IDL. docs/interop.md has the commands that build and run it.
//
// It registers a table on a server of one shard, writes four rows, reads five, and says what came back. Columns are
// bytes in the machine's own order: this is for little-endian machines.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <thrift/protocol/TBinaryProtocol.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TSocket.h>

#include "ParameterServer.h"
#include "paramserver_constants.h"

using namespace headrace::paramserver;
using apache::thrift::protocol::TBinaryProtocol;
using apache::thrift::transport::TFramedTransport;
using apache::thrift::transport::TSocket;

namespace {

const std::string kFqn = "interop.weight", kRun = "interop-cpp", kClient = "rank0";
constexpr int32_t kDim = 2;

template <typename T>
std::string to_column(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
std::vector<T> from_column(const std::string& data) {
  std::vector<T> values(data.size() / sizeof(T));
  std::memcpy(values.data(), data.data(), values.size() * sizeof(T));
  return values;
}

void check(bool is_so, const char* what) {
  if (!is_so) throw std::runtime_error(what);
}

HelloReply hello(ParameterServerClient& client, int64_t epoch, const std::vector<TableSpec>& tables) {
  HelloRequest request;
  request.protocol_version = g_paramserver_constants.PROTOCOL_VERSION;
  request.role = Role::WRITER;
  request.run = kRun;
  request.client = kClient;
  request.epoch = epoch;
  request.rank = 0;
  request.world_size = 1;
  request.tables = tables;
  HelloReply reply;
  client.hello(reply, request);
  return reply;
}

int64_t fingerprint_of(const HelloReply& reply) {
  for (const TableSpec& table : reply.tables) {
    if (table.fqn == kFqn) return table.fingerprint;
  }
  throw std::runtime_error("the table is not registered");
}

int64_t now_us() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since_1970).count();
}

void run(const std::string& host, int port) {
  auto transport = std::make_shared<TFramedTransport>(std::make_shared<TSocket>(host, port));
  ParameterServerClient client(std::make_shared<TBinaryProtocol>(transport));  // strict by default, as it must be
  transport->open();

  // The first hello only asks. An epoch must be higher than any that the shards have seen; the reply to the second
  // hello has the fingerprint of each table.
  TableSpec spec;
  spec.fqn = kFqn;
  spec.num_rows = 1000;
  spec.dim = kDim;
  spec.dtype = DType::FLOAT32;
  spec.has_identities = false;
  const int64_t epoch = hello(client, 0, {}).highest_epoch + 1;
  const HelloReply session = hello(client, epoch, {spec});
  check(session.shards.size() == 1, "this example does not route rows to shards");

  const std::vector<int64_t> row_ids = {7, 0, 999, 42};
  std::vector<float> weights;
  for (int64_t row_id : row_ids) {
    for (int column = 0; column < kDim; ++column) weights.push_back(row_id + column / 2.0f);
  }
  TableDelta delta;
  delta.fqn = kFqn;
  delta.fingerprint = fingerprint_of(session);
  delta.column_offset = 0;
  delta.width = kDim;
  delta.row_ids = to_column(row_ids);
  delta.weights = to_column(weights);
  SetEmbeddingsRequest write;
  write.run = kRun;
  write.client = kClient;
  write.epoch = epoch;
  write.client_seq = session.last_client_seq + 1;
  write.step = 1;
  write.time_us = now_us();
  write.ends_step = true;
  write.is_exact_cut = true;
  write.deltas = {delta};
  SetEmbeddingsReply written;
  client.setEmbeddings(written, write);

  // It is durable now, and every read sees it. Row 8 was never written.
  GetEmbeddingsRequest read;
  read.fqn = kFqn;
  std::vector<int64_t> wanted = row_ids;
  wanted.push_back(8);
  read.row_ids = to_column(wanted);
  read.with_states = false;
  read.with_versions = true;
  GetEmbeddingsReply rows;
  client.getEmbeddings(rows, read);
  check(rows.presence == std::string("\1\1\1\1\0", 5), "presence");
  std::vector<float> expected = weights;
  expected.resize(weights.size() + kDim, 0.0f);
  check(from_column<float>(rows.weights) == expected, "weights");
  check(from_column<int64_t>(rows.epochs) == std::vector<int64_t>({epoch, epoch, epoch, epoch, 0}), "epochs");

  std::string refusal;
  try {
    read.fqn = "no.such";
    client.getEmbeddings(rows, read);
  } catch (const ServerError& error) {
    refusal = error.message;
  }
  check(!refusal.empty(), "an unknown table was read");

  StatusReply status;
  client.status(status);
  check(status.log_seq >= written.seq, "status");
  std::cout << "wrote and read " << row_ids.size() << " rows of " << kFqn << " as epoch " << epoch << "; log seq "
            << written.seq << "; refused: " << refusal << std::endl;
  transport->close();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: " << argv[0] << " HOST PORT" << std::endl;
    return 2;
  }
  try {
    run(argv[1], std::stoi(argv[2]));
  } catch (const std::exception& error) {  // a ServerError too
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
