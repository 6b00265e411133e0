// One pass over memory: gradient, weight and moments in, weight and moments out, each byte once.
// Included once per instruction set; the file's end defines the table of kernels.

// Types known when compiled, for the combinations that training uses most.
template <FloatType kGrad, FloatType kWeight, Master kMaster>
struct FixedTypes {
  explicit FixedTypes(const Job&) {}
  static constexpr FloatType grad() { return kGrad; }
  static constexpr FloatType weight() { return kWeight; }
  static constexpr Master master() { return kMaster; }
};

struct AnyTypes {
  const Job& job;
  explicit AnyTypes(const Job& of) : job(of) {}
  FloatType grad() const { return job.grad_type; }
  FloatType weight() const { return job.weight_type; }
  Master master() const { return job.master_kind; }
};

INLINE F read_float(FloatType type, const void* from) {
  switch (type) {
    case FloatType::kF32:
      return load<F>(from);
    case FloatType::kBf16:
      return from_bf16(load<H>(from));
    default:
      return from_f16(load<H>(from));
  }
}

// Where the elements of one step lie in every buffer.
struct Site {
  const void* grad;
  void* weight;
  void* master;
  MomentSite moments;
};

// Elements in memory order, of any type; fp32 buffers occur in this layout only.
template <class Types>
INLINE void read_grad(Straight, Types types, const Site& site, F (&value)[1]) {
  value[0] = read_float(types.grad(), site.grad);
}
template <class Types>
INLINE void read_weight(Straight, Types types, const Site& site, F (&value)[1]) {
  U raw[1];
  switch (types.master()) {
    case Master::kSplit:
      Straight::load_split(site.weight, site.master, raw);
      value[0] = floats(raw[0]);
      return;
    case Master::kF32:
      value[0] = load<F>(site.master);
      return;
    default:
      value[0] = read_float(types.weight(), site.weight);
  }
}
template <class Types>
INLINE void write_weight(Straight, Types types, const Site& site, const F (&value)[1]) {
  const U raw[1] = {bits(value[0])};
  if (types.master() == Master::kSplit) Straight::store_lower(site.master, raw);
  if (types.master() == Master::kF32) store(site.master, value[0]);
  if (types.weight() == FloatType::kF32) return store(site.weight, value[0]);
  if (types.weight() == FloatType::kF16) return store(site.weight, to_f16(value[0]));
  const bool even = types.master() == Master::kNone;
  store(site.weight, narrow(even ? even_half(raw[0]) : to_upper_half(raw[0]) >> 16));
}

#if LANES >= 8
// Paired elements: bf16 gradients and split masters.
template <class Types>
INLINE void read_grad(Paired, Types, const Site& site, F (&value)[2]) {
  U raw[2];
  Paired::load_upper(site.grad, raw);
  for (int p = 0; p < 2; ++p) value[p] = floats(raw[p]);
}
template <class Types>
INLINE void read_weight(Paired, Types, const Site& site, F (&value)[2]) {
  U raw[2];
  Paired::load_split(site.weight, site.master, raw);
  for (int p = 0; p < 2; ++p) value[p] = floats(raw[p]);
}
template <class Types>
INLINE void write_weight(Paired, Types, const Site& site, const F (&value)[2]) {
  const U raw[2] = {bits(value[0]), bits(value[1])};
  const U rounded[2] = {to_upper_half(raw[0]), to_upper_half(raw[1])};
  Paired::store_lower(site.master, raw);
  Paired::store_upper(site.weight, rounded);
}
#endif

// The magnitude from which on a stored weight is not finite.
template <class Types>
INLINE std::uint32_t weight_limit(Types types) {
  switch (types.weight()) {
    case FloatType::kF32:
      return kInfinity;
    case FloatType::kBf16:
      return kBf16Limit;
    default:
      return kF16Limit;
  }
}

template <class Rule, class Moments>
constexpr bool kApart = Rule::kApart && Moments::kStaged;

// One step; only its moments where the weights follow apart. Returns the magnitudes of the new
// weights; ``lanes`` masks what is past the end.
template <class Rule, class Moments, class Types>
INLINE U step(const Rule& rule, Moments& moments, typename Moments::Block& block, Types types,
              float grad_scale, const Site& site, const typename Moments::Layout::Bits& lanes) {
  using Layout = typename Moments::Layout;
  F grad[Layout::kParts], weight[Layout::kParts] = {};
  Values<Layout, Rule::kMoments> value = {};
  U worst{};
  moments.read(block, site.moments, value);
  read_grad(Layout{}, types, site, grad);
  if constexpr (kApart<Rule, Moments>) {
    prefetch_weights(types, site);
    if (rule.has_l2) read_weight(Layout{}, types, site, weight);
    for (int p = 0; p < Layout::kParts; ++p) {
      rule.moments(grad[p] * grad_scale, weight[p], value[0][p], value[1][p]);
    }
  } else {
    read_weight(Layout{}, types, site, weight);
    for (int p = 0; p < Layout::kParts; ++p) {
      F moment[slots(Rule::kMoments)];
      for (int k = 0; k < slots(Rule::kMoments); ++k) moment[k] = value[k][p];
      rule(grad[p] * grad_scale, weight[p], moment);
      for (int k = 0; k < slots(Rule::kMoments); ++k) value[k][p] = moment[k];
      worst = larger(worst, magnitude(bits(weight[p])) & lanes[p]);
    }
    write_weight(Layout{}, types, site, weight);
  }
  moments.write(block, site.moments, value, lanes);
  return worst;
}

// The rest of a step whose moments are done.
template <class Layout, class Rule, class Types>
INLINE U finish_step(const Rule& rule, Types types, const Site& site,
                     const Values<Layout, 2>& value, const typename Layout::Bits& lanes) {
  F weight[Layout::kParts];
  U worst{};
  read_weight(Layout{}, types, site, weight);
  for (int p = 0; p < Layout::kParts; ++p) {
    rule.apply(weight[p], value[0][p], value[1][p]);
    worst = larger(worst, magnitude(bits(weight[p])) & lanes[p]);
  }
  write_weight(Layout{}, types, site, weight);
  return worst;
}

// What the other half of the work on a stretch will need. Both halves pause each other's streams,
// which the processor's own prefetching does not survive.
template <class Types>
INLINE void prefetch_weights(Types types, const Site& site) {
  __builtin_prefetch(site.weight, 1);
  if (types.master() != Master::kNone) __builtin_prefetch(site.master, 1);
}
template <class Rule, class Types>
INLINE void prefetch_moments(Types, const Site& site) {
  __builtin_prefetch(site.grad);
  for (int k = 0; k < Rule::kMoments; ++k) __builtin_prefetch(site.moments.at[k], 1);
}

INLINE std::uint8_t* offset(void* base, std::size_t bytes) {
  return static_cast<std::uint8_t*>(base) + bytes;
}

// The last ``count`` elements of a buffer, fewer than a step: work(site, lanes) on a padded copy,
// with moments of ``moment_width`` bytes (0: none).
template <class Layout, int kMoments, class Types, class Work>
INLINE U on_padded(Types types, const Site& site, std::size_t count, std::size_t moment_width,
                   Work work) {
  constexpr std::size_t kRoom = 4 * LANES * Layout::kParts;
  const std::size_t weight_bytes = count * width(types.weight());
  const std::size_t master_bytes =
      types.master() == Master::kNone ? 0 : count * (types.master() == Master::kSplit ? 2 : 4);
  alignas(64) std::uint8_t grad[kRoom] = {}, weight[kRoom] = {}, master[kRoom] = {};
  alignas(64) std::uint8_t moment[kMaxMoments][kRoom] = {};
  std::memcpy(grad, site.grad, count * width(types.grad()));
  std::memcpy(weight, site.weight, weight_bytes);
  if (master_bytes != 0) std::memcpy(master, site.master, master_bytes);
  Site padded{grad, weight, master, {{}, site.moments.element}};
  for (int k = 0; k < kMoments; ++k) {
    std::memcpy(moment[k], site.moments.at[k], count * moment_width);
    padded.moments.at[k] = moment[k];
  }
  typename Layout::Bits lanes;
  for (int p = 0; p < Layout::kParts; ++p) {
    alignas(64) std::uint32_t mask[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
      mask[lane] = Layout::element_number(p, lane) < count ? ~0u : 0u;
    }
    lanes[p] = load<U>(mask);
  }
  const U worst = work(padded, lanes);
  std::memcpy(site.weight, weight, weight_bytes);
  if (master_bytes != 0) std::memcpy(site.master, master, master_bytes);
  for (int k = 0; k < kMoments; ++k) {
    std::memcpy(site.moments.at[k], moment[k], count * moment_width);
  }
  return worst;
}

template <class Rule, class Moments, class Types>
bool sweep(const Job& shared, std::size_t begin, std::size_t end) {
  using Layout = typename Moments::Layout;
  using Bits = typename Layout::Bits;
  constexpr std::size_t kStep = LANES * Layout::kParts;
  const Job job = shared;  // a copy, so that the addresses can stay in registers
  const Rule rule(job.coefficient);
  const Types types(job);
  const float grad_scale = job.coefficient[0];
  Moments moments(job);
  Bits everything;
  for (U& lanes : everything) lanes = every(~0u);
  const std::size_t master_width = types.master() == Master::kSplit ? 2 : 4;
  U worst{};
  const auto site_at = [&](std::size_t i) INLINE_LAMBDA {
    Site site;
    site.grad = static_cast<const std::uint8_t*>(job.grad) + i * width(types.grad());
    site.weight = offset(job.weight, i * width(types.weight()));
    site.master = types.master() == Master::kNone ? nullptr : offset(job.master, i * master_width);
    for (int k = 0; k < Rule::kMoments; ++k) {
      site.moments.at[k] = offset(job.moment[k], i * Moments::kBytes);
    }
    site.moments.element = i;
    return site;
  };
  for (std::size_t stretch = begin; stretch < end; stretch += kStretch) {
    const std::size_t last = std::min(end, stretch + kStretch);
    for (std::size_t i = stretch; i < last;) {
      const std::size_t stop = std::min(last, i + kBlock);
      auto block = moments.open(i);
      const auto one = [&](const Site& site, const Bits& lanes) INLINE_LAMBDA {
        return step(rule, moments, block, types, grad_scale, site, lanes);
      };
      for (; i + kStep <= stop; i += kStep) worst = larger(worst, one(site_at(i), everything));
      if (i < stop) {
        worst = larger(worst, on_padded<Layout, Rule::kMoments>(types, site_at(i), stop - i,
                                                                Moments::kBytes, one));
        i = stop;
      }
      moments.shut(block);
    }
    moments.close(
        stretch, last,
        [&](std::size_t i, const Values<Layout, Rule::kMoments>& value, std::size_t count)
            INLINE_LAMBDA {
              if constexpr (kApart<Rule, Moments>) {
                const Site site = site_at(i);
                if (count == kStep) {
                  prefetch_moments<Rule>(types, site_at(i + kStretch));
                  worst = larger(worst, finish_step<Layout>(rule, types, site, value, everything));
                } else {
                  const auto rest = [&](const Site& padded, const Bits& lanes) INLINE_LAMBDA {
                    return finish_step<Layout>(rule, types, padded, value, lanes);
                  };
                  worst = larger(worst, on_padded<Layout, 0>(types, site, count, 0, rest));
                }
              }
            });
  }
  return moments.finite() && highest_lane(worst) < weight_limit(types);
}

template <class Rule, template <class, int, unsigned> class Store>
bool update(const Job& job, std::size_t begin, std::size_t end) {
  using Split = FixedTypes<FloatType::kBf16, FloatType::kBf16, Master::kSplit>;
  using Single = FixedTypes<FloatType::kF32, FloatType::kF32, Master::kNone>;
  using StraightMoments = Store<Straight, Rule::kMoments, Rule::kSigned>;
  using PairedMoments = Store<Paired, Rule::kMoments, Rule::kSigned>;
  const bool split = job.master_kind == Master::kSplit && job.grad_type == FloatType::kBf16;
  const bool single = job.weight_type == FloatType::kF32 && job.grad_type == FloatType::kF32;
  if (split) return sweep<Rule, PairedMoments, Split>(job, begin, end);
  if (single) return sweep<Rule, StraightMoments, Single>(job, begin, end);
  return sweep<Rule, StraightMoments, AnyTypes>(job, begin, end);
}

// Sixteen running sums for every instruction set, added up in one order: the result is the same
// for all. The squares are exact in double precision.
double sum_of_squares(FloatType type, const void* data, std::size_t numel) {
  constexpr std::size_t kSums = 16;
  alignas(64) double sum[kSums] = {};
  alignas(64) float part[kSums];
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  for (std::size_t i = 0; i < numel; i += kSums) {
    const std::size_t count = numel - i < kSums ? numel - i : kSums;
    alignas(64) std::uint8_t raw[4 * kSums];
    const std::uint8_t* from = bytes + i * width(type);
    if (count < kSums) {
      std::memset(raw, 0, sizeof raw);
      std::memcpy(raw, from, count * width(type));
      from = raw;
    }
    for (std::size_t lane = 0; lane < kSums; lane += LANES) {
      store(part + lane, read_float(type, from + lane * width(type)));
    }
    for (std::size_t lane = 0; lane < kSums; ++lane) {
      const double value = part[lane];
      sum[lane] += value * value;
    }
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
  }
  return sum[0];
}

void accumulate(float* to, FloatType type, const void* from, std::size_t numel) {
  const auto* bytes = static_cast<const std::uint8_t*>(from);
  std::size_t i = 0;
  for (; i + LANES <= numel; i += LANES) {
    store(to + i, load<F>(to + i) + read_float(type, bytes + i * width(type)));
  }
  if (i < numel) {
    alignas(64) std::uint8_t raw[4 * LANES] = {};
    alignas(64) float sum[LANES] = {};
    std::memcpy(raw, bytes + i * width(type), (numel - i) * width(type));
    std::memcpy(sum, to + i, (numel - i) * sizeof(float));
    store(sum, load<F>(sum) + read_float(type, raw));
    std::memcpy(to + i, sum, (numel - i) * sizeof(float));
  }
}

// The halves of fp32 values, as raw bits: split_master in optim/formats.py.
void split_master(const std::uint32_t* from, std::uint16_t* upper, std::uint16_t* lower,
                  std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t raw = from[i];
    const bool nan = (raw & 0x7fffffffU) > 0x7f800000U;
    upper[i] = static_cast<std::uint16_t>(nan ? (raw >> 16) | 0x40U : (raw + 0x8000U) >> 16);
    lower[i] = static_cast<std::uint16_t>(raw);
  }
}

template <class Rule>
constexpr RuleKernels kernels_of() {
  static_assert(Rule::kMoments <= kMaxMoments);
  if constexpr (!Rule::kCompact) {
    return {Rule::kName, {&update<Rule, PlainMoments>, nullptr, nullptr}};
  } else {
    return {Rule::kName,
            {&update<Rule, PlainMoments>, &update<Rule, HalfMoments>, &update<Rule, ByteMoments>}};
  }
}

template <class... Rules>
struct Table {
  static constexpr RuleKernels kRules[] = {kernels_of<Rules>()...};
  static constexpr Kernels kKernels = {ISA_NAME,        kRules,           sizeof...(Rules),
                                       &sum_of_squares, &accumulate,      &split_master,
                                       &unpack_nf4,     &unpack_int8,     &pack_nf4,
                                       &pack_int8,      &pack_activation, &unpack_activation,
                                       &dequantise};
};

const Kernels& kTable = All<Table>::kKernels;
