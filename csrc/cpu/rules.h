// The update rules, on LANES elements in registers: g is the scaled gradient, w the fp32 weight.
// Formulas and their order are those of torch.optim's single-tensor path. Included once per
// instruction set. A rule's name and the order of its coefficients are those of its file in optim/.
//
// kCompact: its moments may be bf16 or int8. AMSGrad's running maximum would climb on their
// rounding noise.
//
// kApart: moments() and apply() may run one after the other, apart, with the same result as both in
// one. Roots and quotients take long; staged moments hide that behind their encoding.

// Whether a coefficient is not zero: an integer, which is cheaper to test again and again.
INLINE std::uint32_t nonzero(float value) {
  std::uint32_t raw;
  std::memcpy(&raw, &value, sizeof raw);
  return raw & 0x7fffffffu;
}

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr bool kCompact = true;
  static constexpr bool kApart = true;
  static constexpr int kMoments = 2;
  static constexpr unsigned kSigned = 0b01;
  const std::uint32_t has_l2;
  const float decay, l2, take1, keep2, take2, root_scale, eps, step_size;
  explicit Adam(const float* c)
      : has_l2(nonzero(c[2])),
        decay(c[1]),
        l2(c[2]),
        take1(c[3]),
        keep2(c[4]),
        take2(c[5]),
        root_scale(c[6]),
        eps(c[7]),
        step_size(c[8]) {}
  INLINE void moments(F g, F w, F& mean, F& square) const {
    if (has_l2) g = g + w * l2;
    mean = mean + (g - mean) * take1;
    square = square * keep2 + (g * take2) * g;
  }
  INLINE void apply(F& w, F mean, F square) const {
    w = w * decay - (mean * step_size) / (root(square) * root_scale + eps);
  }
  INLINE void operator()(F g, F& w, F (&m)[2]) const {
    moments(g, w, m[0], m[1]);
    apply(w, m[0], m[1]);
  }
};

struct Amsgrad : Adam {
  static constexpr const char* kName = "amsgrad";
  static constexpr bool kCompact = false;
  static constexpr int kMoments = 3;
  static constexpr unsigned kSigned = 0b001;
  using Adam::Adam;
  INLINE void operator()(F g, F& w, F (&m)[3]) const {
    moments(g, w, m[0], m[1]);
    m[2] = floats(larger(magnitude(bits(m[2])), magnitude(bits(m[1]))));  // NaN is the largest
    apply(w, m[0], m[2]);
  }
};

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr bool kCompact = false;  // it has none
  static constexpr bool kApart = false;
  static constexpr int kMoments = 0;
  static constexpr unsigned kSigned = 0;
  const std::uint32_t has_l2;
  const float l2, lr;
  explicit Sgd(const float* c) : has_l2(nonzero(c[1])), l2(c[1]), lr(c[2]) {}
  INLINE void operator()(F g, F& w, F (&)[1]) const {
    if (has_l2) g = g + w * l2;
    w = w - g * lr;
  }
};

// The first step's ``keep`` is 0 and its ``take`` 1; ``ahead`` is the momentum with Nesterov, else
// 0.
struct Momentum {
  static constexpr const char* kName = "momentum";
  static constexpr bool kCompact = true;
  static constexpr bool kApart = false;
  static constexpr int kMoments = 1;
  static constexpr unsigned kSigned = 0b1;
  const std::uint32_t has_l2;
  const float l2, lr, keep, take, ahead;
  explicit Momentum(const float* c)
      : has_l2(nonzero(c[1])), l2(c[1]), lr(c[2]), keep(c[3]), take(c[4]), ahead(c[5]) {}
  INLINE void operator()(F g, F& w, F (&m)[1]) const {
    if (has_l2) g = g + w * l2;
    m[0] = m[0] * keep + g * take;
    const F direction = ahead != 0.0f ? g + m[0] * ahead : m[0];
    w = w - direction * lr;
  }
};

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr bool kCompact = true;
  static constexpr bool kApart = false;
  static constexpr int kMoments = 1;
  static constexpr unsigned kSigned = 0b0;
  const std::uint32_t has_l2;
  const float l2, lr, eps;
  explicit Adagrad(const float* c) : has_l2(nonzero(c[1])), l2(c[1]), lr(c[2]), eps(c[3]) {}
  INLINE void operator()(F g, F& w, F (&m)[1]) const {
    if (has_l2) g = g + w * l2;
    m[0] = m[0] + g * g;
    w = w - (g * lr) / (root(m[0]) + eps);
  }
};

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr bool kCompact = true;
  static constexpr bool kApart = false;
  static constexpr int kMoments = 1;
  static constexpr unsigned kSigned = 0b1;
  const float decay, lr, keep1, take1, take2;
  explicit Lion(const float* c) : decay(c[1]), lr(c[2]), keep1(c[3]), take1(c[4]), take2(c[5]) {}
  INLINE void operator()(F g, F& w, F (&m)[1]) const {
    w = w * decay;
    const F mixed = m[0] * keep1 + g * take1;
    const F zero{};
    w = w - (mixed > zero ? all(lr) : mixed < zero ? all(-lr) : zero);
    m[0] = m[0] + (g - m[0]) * take2;
  }
};

// An average of the weights, which stay as they are; it runs after another rule. The first average
// is the weight itself, which a difference would round.
struct Average {
  static constexpr const char* kName = "average";
  static constexpr bool kCompact = false;
  static constexpr bool kApart = false;
  static constexpr int kMoments = 1;
  static constexpr unsigned kSigned = 0b1;
  const float take;
  explicit Average(const float* c) : take(c[1]) {}
  INLINE void operator()(F, F& w, F (&m)[1]) const {
    m[0] = take == 1.0f ? w : m[0] + (w - m[0]) * take;
  }
};

// Every rule; a new one is written above and named here, and nowhere else.
template <template <class...> class List>
using All = List<Adam, Amsgrad, Sgd, Momentum, Adagrad, Lion, Average>;
