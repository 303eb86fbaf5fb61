// Reads embedding rows by id from a Headrace server or from a `headrace replica`, with the code that Thrift generates.
//
//     apt-get install thrift-compiler libthrift-dev libboost-dev g++     # of Debian 12: Thrift 0.17
//     thrift -o examples/cpp --gen cpp:no_skeleton schemas/paramserver.thrift
//     g++ -std=c++17 -O2 -Iexamples/cpp/gen-cpp examples/cpp/headrace.cpp examples/cpp/gen-cpp/*.cpp -lthrift -o examples/cpp/headrace
//     examples/cpp/headrace 127.0.0.1:7601 user.weight 3 5 8
//
// It prints one line a row: the id, and its weights, or `missing`. Without ids it reads them from stdin, a line at a time.
// The token, if the server needs one, is in the variable HEADRACE_TOKEN. In a program of yours:
//
//     Reader reader("127.0.0.1:7601");  // of any shard, or of a replica
//     const Rows rows = reader.get("user.weight", {3, 5, 8});
//     const std::vector<float> weights = rows.weights<float>();  // ids × rows.dim
//
// Tables have their full names, as `headrace table list` shows them. A call that fails throws the server's error, a
// `ServerError` with `code` and `message`, or one of Thrift's. For machines that are little-endian.
#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <thrift/protocol/TBinaryProtocol.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TSocket.h>

#include "ParameterServer.h"
#include "paramserver_constants.h"

namespace {

using namespace headrace::paramserver;
using apache::thrift::protocol::TBinaryProtocol;
using apache::thrift::transport::TFramedTransport;
using apache::thrift::transport::TSocket;
using apache::thrift::transport::TTransportException;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "columns are copied as they are, little-endian");

constexpr int kMostRetries = 8;  // how often a read asks a shard again that is away, after 10, 20, 40 … ms
constexpr int64_t kMostBytes = 8 << 20;  // of rows in a reply: Thrift's library takes frames of 16 MB

/// Returns FNV-1a 64 of a table's name.
uint64_t table_seed(std::string_view fqn) {
  uint64_t seed = 0xcbf29ce484222325;
  for (unsigned char byte : fqn) seed = (seed ^ byte) * 0x100000001b3;
  return seed;
}

/// Returns the hash by which a row is routed: splitmix64 of the row id xor the table's seed.
uint64_t hash_of_row(uint64_t seed, int64_t row_id) {
  uint64_t value = (static_cast<uint64_t>(row_id) ^ seed) + 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent > 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float size = static_cast<float>(fraction) / (1 << 24);
  return sign ? -size : size;
}

/// Returns the bytes of one element; throws for types that embedding tables do not have.
size_t bytes_of(const TableSpec& table) {
  switch (table.dtype) {
    case DType::FLOAT32: return 4;
    case DType::FLOAT64: return 8;
    case DType::FLOAT16:
    case DType::BFLOAT16: return 2;
    default: throw std::runtime_error("table " + table.fqn + " has elements of a type that is not read here");
  }
}

/// Rows in the order in which they were asked for.
struct Rows {
  DType::type dtype;
  int32_t dim;
  std::vector<bool> is_present;
  std::string bytes;  ///< Elements as they travel, row after row; zeros where a row is missing.

  /// Returns ids × dim numbers, as float or double; a double holds every type's values exactly.
  template <typename Real>
  std::vector<Real> weights() const {
    switch (dtype) {
      case DType::FLOAT32: return decoded<Real, float>([](float value) { return value; });
      case DType::FLOAT64: return decoded<Real, double>([](double value) { return value; });
      case DType::FLOAT16: return decoded<Real, uint16_t>(half_to_float);
      default: return decoded<Real, uint16_t>([](uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); });
    }
  }

 private:
  template <typename Real, typename Element, typename Decode>
  std::vector<Real> decoded(Decode decode) const {
    std::vector<Element> elements(bytes.size() / sizeof(Element));
    std::memcpy(elements.data(), bytes.data(), bytes.size());
    std::vector<Real> values(elements.size());
    std::transform(elements.begin(), elements.end(), values.begin(),
                   [&](Element element) { return static_cast<Real>(decode(element)); });
    return values;
  }
};

/// Reads rows from all shards of a server, or from a replica, which is one shard. Use it in one thread at a time.
class Reader {
 public:
  /// Finds shards and tables from the address of any shard, HOST:PORT.
  ///
  /// `timeout_ms` bounds each wait for a shard. The token is sent to this machine alone, since nothing is encrypted.
  explicit Reader(const std::string& address, std::string token = "", int timeout_ms = 10'000)
      : token_(std::move(token)), timeout_ms_(timeout_ms) {
    const size_t colon = address.rfind(':');
    const char* end = address.data() + address.size();
    if (colon == std::string::npos || colon == 0 ||
        std::from_chars(address.data() + colon + 1, end, seed_.port).ptr != end || seed_.port == 0) {
      throw std::runtime_error("address '" + address + "' is not HOST:PORT");
    }
    seed_.host = address.substr(0, colon);
    if (seed_.host.front() == '[') seed_.host = seed_.host.substr(1, seed_.host.size() - 2);
    refresh();
  }

  /// Asks again for shards and tables.
  void refresh() {
    connections_.clear();
    HelloReply reply;
    connect(seed_, reply);
    tables_.clear();
    for (const TableSpec& table : reply.tables) tables_[table.fqn] = table;
    most_bytes_ = std::min(reply.limits.max_frame_bytes / 2, kMostBytes);
    learn(reply.shards);
  }

  /// Returns the tables by name, as of the last `refresh`.
  const std::map<std::string, TableSpec>& tables() const { return tables_; }

  /// Reads rows of a table; ids may come in any order. Rows of several shards may be of different moments.
  Rows get(const std::string& fqn, const std::vector<int64_t>& row_ids) {
    if (tables_.count(fqn) == 0) refresh();  // it may be new
    const auto found = tables_.find(fqn);
    if (found == tables_.end()) throw std::runtime_error("no table " + fqn + " here; there are " + names());
    const TableSpec& table = found->second;
    const size_t row_bytes = table.dim * bytes_of(table);
    Rows rows{table.dtype, table.dim, std::vector<bool>(row_ids.size()), std::string(row_ids.size() * row_bytes, '\0')};
    std::vector<size_t> left(row_ids.size());
    std::iota(left.begin(), left.end(), 0);
    try {
      for (int attempt = 0; !left.empty();) {
        std::vector<size_t> later, failed;
        std::exception_ptr why;
        read(table, row_ids, left, rows, later, failed, why);
        if (!failed.empty()) {
          if (attempt == kMostRetries) std::rethrow_exception(why);
          std::this_thread::sleep_for(std::chrono::milliseconds(5 << ++attempt));
        }
        left = std::move(later);
        left.insert(left.end(), failed.begin(), failed.end());
      }
    } catch (...) {
      connections_.clear();  // the replies that are still to come belong to no call
      throw;
    }
    return rows;
  }

 private:
  struct Shard {
    std::string host;
    int port = 0;
    int64_t term = 0;
  };

  struct Connection {
    std::shared_ptr<TFramedTransport> transport;
    std::unique_ptr<ParameterServerClient> client;
    bool has_answered = false;  // since its hello
  };

  /// Reads one request's worth of rows from each shard, all at the same time.
  ///
  /// `later` gets the places of rows beyond that, and `failed` those that `why` says to ask for again.
  void read(const TableSpec& table, const std::vector<int64_t>& row_ids, const std::vector<size_t>& places, Rows& rows,
            std::vector<size_t>& later, std::vector<size_t>& failed, std::exception_ptr& why) {
    const size_t row_bytes = table.dim * bytes_of(table);
    const size_t most = std::max<int64_t>(1, most_bytes_ / static_cast<int64_t>(16 + row_bytes));
    std::map<int32_t, std::vector<size_t>> parts;
    for (size_t place : places) {
      std::vector<size_t>& part = parts[shard_of(table, row_ids[place])];
      (part.size() < most ? part : later).push_back(place);
    }
    std::map<int32_t, std::shared_ptr<Connection>> asked;
    for (const auto& [shard, part] : parts) {
      const bool is_asked = is_done(shard, why, [&, shard = shard, &part = part] {
        std::vector<int64_t> wanted;
        for (size_t place : part) wanted.push_back(row_ids[place]);
        GetEmbeddingsRequest request;
        request.fqn = table.fqn;
        request.row_ids.assign(reinterpret_cast<const char*>(wanted.data()), wanted.size() * sizeof(int64_t));
        request.with_states = request.with_versions = false;
        asked[shard] = connected(shard);
        asked[shard]->client->send_getEmbeddings(request);
      });
      if (!is_asked) asked.erase(shard);
    }
    for (const auto& [shard, part] : parts) {
      const auto connection = asked.find(shard);
      GetEmbeddingsReply reply;
      const bool is_answered = connection != asked.end() && is_done(shard, why, [&] {
        connection->second->client->recv_getEmbeddings(reply);
        connection->second->has_answered = true;
      });
      if (!is_answered) {
        failed.insert(failed.end(), part.begin(), part.end());
        continue;
      }
      if (reply.presence.size() != part.size() || reply.weights.size() != part.size() * row_bytes) {
        throw std::runtime_error("a reply of another length than its rows");
      }
      for (size_t index = 0; index < part.size(); ++index) {
        rows.is_present[part[index]] = reply.presence[index] == RowPresence::PRESENT;
        std::memcpy(&rows.bytes[part[index] * row_bytes], &reply.weights[index * row_bytes], row_bytes);
      }
    }
  }

  /// Does something with a shard; returns false, and says why, where it is to be done again.
  template <typename Work>
  bool is_done(int32_t shard, std::exception_ptr& why, Work work) {
    try {
      work();
      return true;
    } catch (const ServerError& error) {
      if (error.code != ErrorCode::UNAVAILABLE) throw;
      learn(error.shards);
    } catch (const TTransportException&) {  // the server closes idle connections, and ends
      const auto lost = connections_.find(shard);
      if (lost == connections_.end() || !lost->second->has_answered) throw;
      connections_.erase(lost);
    }
    why = std::current_exception();
    return false;
  }

  /// Takes addresses of shards that are as new, by their terms.
  void learn(const std::vector<ShardAddress>& shards) {
    for (const ShardAddress& each : shards) {
      Shard& known = shards_[each.shard];  // a term is 0 where there are none
      if (each.term < known.term) continue;
      if (known.host != each.host || known.port != each.port) connections_.erase(each.shard);
      known = {each.host, each.port, each.term};
    }
  }

  int32_t shard_of(const TableSpec& table, int64_t row_id) const {
    return std::next(shards_.begin(), hash_of_row(table_seed(table.fqn), row_id) % shards_.size())->first;
  }

  /// Returns the connection to a shard, greeted.
  std::shared_ptr<Connection> connected(int32_t shard) {
    const auto known = shards_.find(shard);
    if (known == shards_.end()) throw std::runtime_error("nobody says where shard " + std::to_string(shard) + " is");
    std::shared_ptr<Connection>& connection = connections_[shard];
    if (!connection) {
      HelloReply reply;
      try {
        connection = connect(known->second, reply);
      } catch (...) {
        connections_.erase(shard);
        throw;
      }
    }
    return connection;
  }

  /// Connects and says hello.
  std::shared_ptr<Connection> connect(const Shard& shard, HelloReply& reply) const {
    in6_addr address;
    const bool is_here = shard.host == "localhost" || shard.host == "::1" ||
                         (shard.host.rfind("127.", 0) == 0 && inet_pton(AF_INET, shard.host.c_str(), &address) == 1);
    if (!token_.empty() && !is_here) {
      throw std::runtime_error("the token is not sent to " + shard.host + ", where others could read it on its way");
    }
    const auto socket = std::make_shared<TSocket>(shard.host, shard.port);
    socket->setConnTimeout(timeout_ms_);
    socket->setSendTimeout(timeout_ms_);
    socket->setRecvTimeout(timeout_ms_);
    auto connection = std::make_shared<Connection>();
    connection->transport = std::make_shared<TFramedTransport>(socket);
    connection->client = std::make_unique<ParameterServerClient>(std::make_shared<TBinaryProtocol>(connection->transport));
    connection->transport->open();
    HelloRequest hello;
    hello.protocol_version = g_paramserver_constants.PROTOCOL_VERSION;
    hello.role = Role::READER;
    hello.epoch = hello.rank = 0;
    hello.world_size = 1;
    hello.__set_asks_places(true);
    if (!token_.empty()) hello.__set_token(token_);
    connection->client->hello(reply, hello);
    return connection;
  }

  std::string names() const {
    std::string all;
    for (const auto& [name, table] : tables_) all += (all.empty() ? "" : ", ") + name;
    return all.empty() ? "none" : all;
  }

  std::string token_;
  int timeout_ms_;
  Shard seed_;
  std::map<std::string, TableSpec> tables_;
  int64_t most_bytes_ = kMostBytes;
  std::map<int32_t, Shard> shards_;
  std::map<int32_t, std::shared_ptr<Connection>> connections_;  // by shard
};

int64_t row_id_of(const std::string& text) {
  int64_t row_id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), row_id);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::runtime_error("'" + text + "' is not a row id");
  }
  return row_id;
}

std::string text_of(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

void print_rows(Reader& reader, const std::string& fqn, const std::vector<int64_t>& row_ids) {
  const Rows rows = reader.get(fqn, row_ids);
  const std::vector<double> weights = rows.weights<double>();
  for (size_t row = 0; row < row_ids.size(); ++row) {
    std::cout << row_ids[row];
    if (!rows.is_present[row]) std::cout << " missing";
    for (int32_t column = 0; rows.is_present[row] && column < rows.dim; ++column) {
      std::cout << ' ' << text_of(weights[row * rows.dim + column]);
    }
    std::cout << '\n';
  }
  std::cout << std::flush;
}

std::vector<int64_t> row_ids_of(const std::vector<std::string>& texts) {
  std::vector<int64_t> row_ids;
  for (const std::string& text : texts) row_ids.push_back(row_id_of(text));
  return row_ids;
}

void run(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2) throw std::runtime_error("usage: headrace HOST:PORT TABLE [ID...]");
  const char* token = std::getenv("HEADRACE_TOKEN");
  Reader reader(arguments[0], token ? token : "");
  if (arguments.size() > 2) {
    print_rows(reader, arguments[1], row_ids_of({arguments.begin() + 2, arguments.end()}));
    return;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    print_rows(reader, arguments[1], row_ids_of({std::istream_iterator<std::string>(words), {}}));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const ServerError& error) {
    std::cerr << "error: " << error.message << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}
