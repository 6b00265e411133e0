// How many elements one step takes, and in which order they lie in the lanes. Included once per
// instruction set.
//
// Straight: LANES elements in memory order. Paired: 2 * LANES elements, for buffers of bytes and
// halves only. Widening by unpacking whole words (and narrowing by packing, its inverse) costs half
// of the shuffles, which are what compact formats spend their time on, and much can be done on
// words, twice as many at once; the order that unpacking leaves does not matter to elementwise
// work.
//
// Halves are loaded as the upper halves of fp32 bits. A byte code is loaded as the float that it
// stands for (see moments.h), and stored from such a float's bits.

constexpr std::uint32_t kCodeBits = 0x07f00000u;  // of a signed code's size
constexpr std::uint32_t kSignBit = 0x80000000u;
constexpr std::uint32_t kSignedZeroBits = 112u << 23;
constexpr std::uint32_t kUnsignedZeroBits = 96u << 23;
constexpr int kCodeShift = 20;

struct Straight {
  static constexpr int kParts = 1;
  using Bits = U[1];
  static constexpr std::uint32_t element_number(int, int lane) {
    return static_cast<std::uint32_t>(lane);
  }
  INLINE static void load_upper(const void* from, Bits& to) { to[0] = widen(load<H>(from)) << 16; }
  INLINE static void load_split(const void* upper, const void* lower, Bits& to) {
    to[0] = join(widen(load<H>(upper)), widen_signed(load<H>(lower)));
  }
  INLINE static void load_signed_codes(const void* from, Bits& to) {
    const U raw = widen_signed(load<B>(from)) << kCodeShift;
    to[0] = (raw & (kSignBit | kCodeBits)) | kSignedZeroBits;
  }
  INLINE static void load_unsigned_codes(const void* from, Bits& to) {
    to[0] = (widen(load<B>(from)) << kCodeShift) | kUnsignedZeroBits;
  }
  INLINE static void store_upper(void* to, const Bits& from) { store(to, narrow(from[0] >> 16)); }
  INLINE static void store_lower(void* to, const Bits& from) { store(to, narrow(from[0])); }
  INLINE static void store_signed_codes(void* to, const Bits& from) {
    store(to, narrow_to_byte(((from[0] >> 24) & 0x80u) | ((from[0] >> kCodeShift) & 0x7fu)));
  }
  // ``least``: the smallest code that may be stored.
  INLINE static void store_unsigned_codes(void* to, const Bits& from, std::uint32_t least) {
    const U code = (from[0] - kUnsignedZeroBits) >> kCodeShift;
    store(to, narrow_to_byte(larger(code, every(least))));
  }
};

#if LANES >= 8
struct Paired {
  static constexpr int kParts = 2;
  using Bits = U[2];
  // Unpacking works within groups of eight words: the first four go to part 0.
  static constexpr std::uint32_t element_number(int part, int lane) {
    return static_cast<std::uint32_t>((lane / 4) * 8 + lane % 4 + part * 4);
  }
  INLINE static void unpack(W low, W high, Bits& to) {
    to[0] = unpack_first(low, high);
    to[1] = unpack_second(low, high);
  }
  INLINE static void load_upper(const void* from, Bits& to) { unpack(W{}, load<W>(from), to); }
  INLINE static void load_split(const void* upper, const void* lower, Bits& to) {
    const W low = load<W>(lower);
    unpack(low, load<W>(upper) - (low >> 15), to);  // the lower half's sign, as in join
  }
  INLINE static void load_signed_codes(const void* from, Bits& to) {
    constexpr std::uint16_t kKept = (kSignBit | kCodeBits) >> 16, kZero = kSignedZeroBits >> 16;
    const W raw = words_of_signed_bytes(from) << (kCodeShift - 16);
    unpack(W{}, (raw & kKept) | kZero, to);
  }
  INLINE static void load_unsigned_codes(const void* from, Bits& to) {
    constexpr std::uint16_t kZero = kUnsignedZeroBits >> 16;
    unpack(W{}, (words_of_bytes(from) << (kCodeShift - 16)) | kZero, to);
  }
  INLINE static void store_upper(void* to, const Bits& from) {
    store(to, pack_upper(from[0], from[1]));
  }
  INLINE static void store_lower(void* to, const Bits& from) {
    store(to, pack_lower(from[0], from[1]));
  }
  INLINE static void store_signed_codes(void* to, const Bits& from) {
    const W words = pack_upper(from[0], from[1]);
    store_bytes(to, ((words >> 8) & 0x80) | ((words >> 4) & 0x7f));
  }
  INLINE static void store_unsigned_codes(void* to, const Bits& from, std::uint32_t least) {
    constexpr std::uint32_t kAbove = kUnsignedZeroBits >> kCodeShift;  // is cut off with the rest
    const W code = pack_upper(from[0], from[1]) >> (kCodeShift - 16);
    store_bytes(to, larger(code, W{} + static_cast<std::uint16_t>(kAbove + least)));
  }
};
#else
using Paired = Straight;
#endif
