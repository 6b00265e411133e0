// How many elements one step takes, and in which order they lie in the lanes. Included once per
// instruction set.
//
// Straight: LANES elements in memory order. Paired: 2 * LANES elements, for buffers of bytes and
// halves only. Widening by unpacking whole words (and narrowing by packing, its inverse) costs half
// of the shuffles, which are what compact formats spend their time on; the order that unpacking
// leaves does not matter to elementwise work.

struct Straight {
  static constexpr int kParts = 1;
  using Bits = U[1];
  INLINE static U element_numbers(int) { return lane_numbers(); }
  // Halves as the upper halves of fp32 bits; codes from bit 20 up.
  INLINE static void load_upper(const void* from, Bits& to) { to[0] = widen(load<H>(from)) << 16; }
  INLINE static void load_codes(const void* from, Bits& to) { to[0] = widen(load<B>(from)) << 20; }
  INLINE static void load_split(const void* upper, const void* lower, Bits& to) {
    to[0] = join(widen(load<H>(upper)), widen_signed(load<H>(lower)));
  }
  // Stores what is at most 16 bits; the lower 16 bits of any; the lower 8 of at most 16 bits.
  INLINE static void store_halves(void* to, const Bits& from) { store(to, narrow(from[0])); }
  INLINE static void store_low_halves(void* to, const Bits& from) { store(to, narrow(from[0])); }
  INLINE static void store_codes(void* to, const Bits& from) { store(to, narrow_to_byte(from[0])); }
};

#if LANES >= 8
struct Paired {
  static constexpr int kParts = 2;
  using Bits = U[2];
  // Unpacking works within groups of eight words: the first four go to part 0.
  INLINE static U element_numbers(int part) {
    const U lane = lane_numbers();
    return (lane / 4u) * 8u + lane % 4u + static_cast<std::uint32_t>(part) * 4u;
  }
  INLINE static void unpack(Words low, Words high, Bits& to) {
    to[0] = unpack_first(low, high);
    to[1] = unpack_second(low, high);
  }
  INLINE static void load_upper(const void* from, Bits& to) {
    unpack(Words{}, load_words(from), to);
  }
  INLINE static void load_codes(const void* from, Bits& to) {
    unpack(Words{}, shift_words(load_bytes(from), 4), to);
  }
  INLINE static void load_split(const void* upper, const void* lower, Bits& to) {
    unpack(load_words(lower), load_words(upper), to);
    for (U& raw : to) raw = (raw ^ 0x8000u) - 0x8000u;  // the lower half's sign, as in join
  }
  INLINE static void store_halves(void* to, const Bits& from) {
    store_words(to, pack(from[0], from[1]));
  }
  INLINE static void store_low_halves(void* to, const Bits& from) {
    store_words(to, pack(from[0] & 0xffffu, from[1] & 0xffffu));
  }
  INLINE static void store_codes(void* to, const Bits& from) {
    store_bytes(to, pack(from[0], from[1]));
  }
};
#else
using Paired = Straight;
#endif
