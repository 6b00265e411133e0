#include "checksum.h"

#include <array>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace overspill {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;  // bit-reversed, without x^32

// Eight tables: byte k of a 64-bit word is looked up in table 7 - k.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (int table = 1; table < 8; ++table) {
    for (int byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[table - 1][byte];
      tables[table][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// All the functions below work on the register: the crc before its final inversion.
std::uint32_t scalar(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    std::uint64_t word = 0;
    for (int k = 0; k < 8; ++k) word |= static_cast<std::uint64_t>(data[k]) << (8 * k);
    word ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; nbytes > 0; ++data, --nbytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

// x^power mod P, bit-reversed and shifted as a carry-less product of reversed operands needs it.
constexpr std::uint64_t fold_constant(int power) {
  std::uint32_t value = 0x80000000;  // x^0
  for (int step = 0; step < power; ++step) {
    value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
  }
  return static_cast<std::uint64_t>(value) << 1;
}

// To move 128 bits ahead by `bits`: the half that comes first in memory is the higher power of x.
// (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009.)
struct Fold {
  std::uint64_t first, second;
};
constexpr Fold fold_by(int bits) { return {fold_constant(bits + 32), fold_constant(bits - 32)}; }

constexpr Fold kBy128 = fold_by(128);
constexpr Fold kBy512 = fold_by(512);
constexpr Fold kBy4096 = fold_by(4096);

// gcc 12 takes the intrinsics' own "undefined" operands for uninitialised variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC push_options
#pragma GCC target("pclmul,sse4.1")

inline __m128i fold128(__m128i state, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(state, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(state, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

inline __m128i load128(const unsigned char* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

inline __m128i constants128(Fold fold) {
  return _mm_set_epi64x(static_cast<long long>(fold.second), static_cast<long long>(fold.first));
}

// What 16 folded bytes and the rest of the data leave in the register.
inline std::uint32_t reduce(__m128i state, const unsigned char* rest, std::size_t nbytes) {
  unsigned char bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), state);
  return scalar(scalar(0, bytes, sizeof bytes), rest, nbytes);
}

std::uint32_t pclmul(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  if (nbytes < 128) return scalar(crc, data, nbytes);
  __m128i state[4];
  for (int k = 0; k < 4; ++k) state[k] = load128(data + 16 * k);
  state[0] = _mm_xor_si128(state[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  data += 64, nbytes -= 64;
  const __m128i by512 = constants128(kBy512);
  for (; nbytes >= 64; data += 64, nbytes -= 64) {
    for (int k = 0; k < 4; ++k) state[k] = fold128(state[k], by512, load128(data + 16 * k));
  }
  const __m128i by128 = constants128(kBy128);
  __m128i folded = state[0];
  for (int k = 1; k < 4; ++k) folded = fold128(folded, by128, state[k]);
  for (; nbytes >= 16; data += 16, nbytes -= 16) folded = fold128(folded, by128, load128(data));
  return reduce(folded, data, nbytes);
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("pclmul,sse4.1,avx512f,avx512vl,avx512bw,avx512dq,vpclmulqdq")

inline __m512i fold512(__m512i state, __m512i constants, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(state, constants, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(state, constants, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // three-way xor
}

inline __m512i constants512(Fold fold) {
  return _mm512_broadcast_i32x4(
      _mm_set_epi64x(static_cast<long long>(fold.second), static_cast<long long>(fold.first)));
}

std::uint32_t avx512(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  constexpr std::size_t kStride = 512;  // 8 accumulators: enough loads in flight to fill the bus
  if (nbytes < 2 * kStride) return pclmul(crc, data, nbytes);
  __m512i state[8];
  for (int k = 0; k < 8; ++k) state[k] = _mm512_loadu_si512(data + 64 * k);
  state[0] =
      _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  data += kStride, nbytes -= kStride;
  const __m512i by4096 = constants512(kBy4096);
  for (; nbytes >= kStride; data += kStride, nbytes -= kStride) {
    for (int k = 0; k < 8; ++k) {
      _mm_prefetch(reinterpret_cast<const char*>(data) + 64 * k + 4096, _MM_HINT_T0);
      state[k] = fold512(state[k], by4096, _mm512_loadu_si512(data + 64 * k));
    }
  }
  const __m512i by512 = constants512(kBy512);
  __m512i folded = state[0];
  for (int k = 1; k < 8; ++k) folded = fold512(folded, by512, state[k]);
  for (; nbytes >= 64; data += 64, nbytes -= 64) {
    folded = fold512(folded, by512, _mm512_loadu_si512(data));
  }
  const __m128i by128 = _mm512_castsi512_si128(constants512(kBy128));
  __m128i last = _mm512_castsi512_si128(folded);
  const __m128i lanes[3] = {_mm512_extracti32x4_epi32(folded, 1),
                            _mm512_extracti32x4_epi32(folded, 2),
                            _mm512_extracti32x4_epi32(folded, 3)};
  for (const __m128i lane : lanes) {
    const __m128i low = _mm_clmulepi64_si128(last, by128, 0x00);
    const __m128i high = _mm_clmulepi64_si128(last, by128, 0x11);
    last = _mm_xor_si128(_mm_xor_si128(low, high), lane);
  }
  unsigned char bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), last);
  return scalar(scalar(0, bytes, sizeof bytes), data, nbytes);
}
#pragma GCC pop_options

#pragma GCC diagnostic pop

bool has_pclmul() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
bool has_avx512() {
  return has_pclmul() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("vpclmulqdq");
}

#elif defined(__aarch64__) && defined(__linux__)

#pragma GCC push_options
#pragma GCC target("+crc")
std::uint32_t armv8(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    crc = __crc32d(crc, word);
  }
  for (; nbytes > 0; ++data, --nbytes) crc = __crc32b(crc, *data);
  return crc;
}
#pragma GCC pop_options

bool has_armv8() { return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; }  // HWCAP_CRC32

#endif

using Register = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t);
struct Way {
  const char* name;
  Register run;
};

std::vector<Way> find_ways() {
  std::vector<Way> ways;
#if defined(__x86_64__)
  if (has_avx512()) ways.push_back({"avx512", avx512});
  if (has_pclmul()) ways.push_back({"pclmul", pclmul});
#elif defined(__aarch64__) && defined(__linux__)
  if (has_armv8()) ways.push_back({"armv8", armv8});
#endif
  ways.push_back({"scalar", scalar});
  return ways;
}

const std::vector<Way>& ways() {
  static const std::vector<Way> found = find_ways();
  return found;
}

std::uint32_t finish(Register run, const void* data, std::size_t nbytes, std::uint32_t seed) {
  return ~run(~seed, static_cast<const unsigned char*>(data), nbytes);
}

}  // namespace

std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t seed) {
  static const Register best = ways().front().run;
  return finish(best, data, nbytes, seed);
}

std::uint32_t crc32_by(const std::string& way, const void* data, std::size_t nbytes,
                       std::uint32_t seed) {
  std::string names;
  for (const Way& have : ways()) {
    if (way == have.name) return finish(have.run, data, nbytes, seed);
    names += names.empty() ? "" : ", ";
    names += have.name;
  }
  throw std::invalid_argument("no way '" + way + "' to sum here; this machine has " + names);
}

std::vector<std::string> crc32_ways() {
  std::vector<std::string> names;
  for (const Way& way : ways()) names.emplace_back(way.name);
  return names;
}

}  // namespace overspill
