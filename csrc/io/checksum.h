// CRC-32 (the polynomial of zlib, gzip and PNG, so that Python's zlib.crc32 is oracle and
// fallback).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace overspill {

// Continues `seed` over `nbytes` at `data`, as zlib's crc32 does; the best code for this CPU.
std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t seed = 0);

// The same by a named way ("avx512", "pclmul", "armv8", "scalar"); for tests and benchmarks.
// Throws std::invalid_argument for a way that this machine lacks.
std::uint32_t crc32_by(const std::string& way, const void* data, std::size_t nbytes,
                       std::uint32_t seed);

// The ways this machine has, best first.
std::vector<std::string> crc32_ways();

}  // namespace overspill
