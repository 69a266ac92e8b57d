// The steps of torch's Adam, AdamW and SGD over many tensors in one parallel region, with the bits of CUDA's kernels.
//
// 1. A product contracts with the sum that follows; quotients and roots round correctly; the compiler contracts nothing
//    by itself. compiled.py compares the bits with the device's before a loop is used.
// 2. All numbers of a block stay in the first-level cache between the passes over it: the second pass would else take as
//    long as memory does. Blocks are taken by whichever thread is free: a busy core slows only its own.
// 3. A block's wire copy is converted while the block is in the cache. Which NaN ATen makes of one depends on where in a
//    thread's share it lies: a copy in which there is any is reported, and ATen converts it.
// 4. Gradients may be in half precision, as they came down: a block's are widened while the block is in the cache, and
//    multiplied by the factor of clipping, if there is one.
// 5. Nothing is written before the whole request is known to be possible: a caller can step in another way instead.
//
// build.py compiles this file once for each set of instructions. Threads are those of torch's OpenMP, whose entry the
// loader passes in (`sp_lightning_use`), and no function of the C++ library is called: a library needs libc and libm alone.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 512;
constexpr int kTaken = 32;  // blocks at once: neighbouring blocks share pages

enum Kind : int32_t { kListsAdam, kFusedAdam, kSgd };
enum Flag : int32_t { kMaximize = 1, kDecoupled = 2, kNesterov = 4, kMomentum = 8, kDecay = 16, kAmsgrad = 32, kFirst = 64 };
enum Wire : int32_t { kNone, kBFloat16, kFloat16, kWires };

struct Tensors {
  float* param;
  const void* grad;
  float* state[3];
  int64_t count;
  float scalar[8];
  uint16_t* wire;
  int32_t wire_type, wire_has_nan;
  int32_t grad_type;
  float factor;
};

struct Request {
  Tensors* tensors;
  int64_t count;
  int32_t kind, flags, threads;
  int32_t done;  // 1 once all is stepped
};

// ---- threads

using Parallel = void (*)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);  // GOMP_parallel

Parallel run_on_threads = nullptr;

// Runs the body on each of this many threads at once. The threads share the work by a counter in the body.
template <class Body>
void in_parallel(int64_t threads, Body body) {
  if (threads <= 1) return body();
  run_on_threads([](void* it) { (*static_cast<Body*>(it))(); }, &body, static_cast<unsigned>(threads), 0);
}

// Returns whether this thread's processor state rounds otherwise than to the nearest, or flushes denormals to zero.
bool rounds_oddly() {
#if defined(__x86_64__)
  return _mm_getcsr() & 0xe040;
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control & 0x1c00000;
#else
  return false;
#endif
}

// ---- operations

// Flips the sign, that of a NaN, too: the compiler would fold a minus into a multiply-add, which keeps a NaN's sign.
inline float negated(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  bits ^= 0x80000000u;
  std::memcpy(&a, &bits, sizeof a);
  return a;
}

// Interpolates as torch's `lerp` does.
inline float lerp(float from, float to, float weight) {
  return std::fabs(weight) < 0.5f ? __builtin_fmaf(weight, to - from, from) : __builtin_fmaf(weight - 1, to - from, to);
}

// Returns a + value * x * y, rounded as torch's `addcmul` rounds on CUDA.
inline float addcmul(float a, float x, float y, float value) {
  return value == 1 ? __builtin_fmaf(x, y, a) : __builtin_fmaf(value, x * y, a);
}

// Returns a + value * x / y, rounded as torch's `addcdiv` rounds on CUDA.
inline float addcdiv(float a, float x, float y, float value) {
  return value == 1 ? a + x / y : __builtin_fmaf(value, x / y, a);
}

// ---- wire copies, rounded to the nearest even number (Rule 3)

#if defined(__AVX2__) && defined(__F16C__)
// Rounds 8 numbers to bfloat16, in the lower half of each 32 bits.
inline __m256i upper_halves(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, half)), 16);
}

// Rounds 16 numbers to float16 or bfloat16.
inline __m256i rounded(__m256 a, __m256 b, int32_t type) {
  if (type == kFloat16) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(a, nearest)), _mm256_cvtps_ph(b, nearest), 1);
  }
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(upper_halves(a), upper_halves(b)), 0xd8);
}

// Rounds n numbers to the type of the wire copy, and returns whether there is a NaN.
bool convert(const float* in, uint16_t* out, int64_t n, int32_t type) {
  const bool past_the_cache = reinterpret_cast<uintptr_t>(out) % 32 == 0;  // wire copies are not read soon
  __m256 nan = _mm256_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    alignas(32) float rest[16] = {};
    alignas(32) uint16_t last[16];
    const int64_t m = std::min<int64_t>(16, n - i);
    if (m < 16) std::copy(in + i, in + n, rest);
    const float* from = m < 16 ? rest : in + i;
    const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + 8);
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
    const __m256i halves = rounded(a, b, type);
    if (m < 16) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(last), halves);
      std::copy(last, last + m, out + i);
    } else if (past_the_cache) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), halves);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), halves);
    }
  }
  return _mm256_movemask_ps(nan);
}

#else
// Both round the bits of an FP32 number that is no NaN.
inline uint16_t bfloat16_of(uint32_t bits) { return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); }

inline uint16_t float16_of(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520, from which on the nearest is infinity
  if (bits >= 0x38800000) return sign | ((bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13);
  float size;  // below 2^-14: in a sum with 0.5 the last bit has the size of a denormal's
  std::memcpy(&size, &bits, sizeof size);
  size += 0.5f;
  std::memcpy(&bits, &size, sizeof bits);
  return sign | (bits - 0x3f000000);
}

bool convert(const float* in, uint16_t* out, int64_t n, int32_t type) {
  bool has_nan = false;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, in + i, sizeof bits);
    out[i] = type == kFloat16 ? float16_of(bits) : bfloat16_of(bits);
    has_nan |= in[i] != in[i];
  }
  return has_nan;
}
#endif

// Makes stores past the cache visible to other threads.
void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();  // before this thread ends, after which others read
#endif
}

bool can_convert(int32_t type) { return type >= kNone && type < kWires; }

// ---- gradients that came down in half precision

// `widen` converts n numbers in half precision to FP32.

#if defined(__AVX2__) && defined(__F16C__)
void widen(const uint16_t* in, float* out, int64_t n, int32_t type) {
  for (int64_t i = 0; i < n; i += 8) {
    alignas(16) uint16_t rest[8] = {};
    alignas(32) float last[8];
    const int64_t m = std::min<int64_t>(8, n - i);
    if (m < 8) std::copy(in + i, in + n, rest);
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(m < 8 ? rest : in + i));
    const __m256 wide = type == kFloat16
                            ? _mm256_cvtph_ps(x)
                            : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    if (m < 8) {
      _mm256_store_ps(last, wide);
      std::copy(last, last + m, out + i);
    } else {
      _mm256_storeu_ps(out + i, wide);
    }
  }
}
#else
// Returns the bits of the FP32 number that equals a float16.
inline uint32_t wide_of(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return sign | 0x7f800000 | (rest & 0x3ff) << 13;
  if (rest >= 0x400) return sign | ((rest << 13) + 0x38000000);
  const float size = static_cast<float>(rest) * 0x1p-24f;
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  return sign | bits;
}

void widen(const uint16_t* in, float* out, int64_t n, int32_t type) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = type == kFloat16 ? wide_of(in[i]) : static_cast<uint32_t>(in[i]) << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}
#endif

// Returns a block's gradients in FP32, times the factor of clipping: in place if they are so, else in the buffer `wide`
// (Rule 4).
const float* gradient_of(const Tensors& t, int64_t at, int64_t n, float* wide) {
  if (t.grad_type == kNone) {
    const float* as_it_is = static_cast<const float*>(t.grad) + at;
    if (t.factor == 1) return as_it_is;
    std::copy(as_it_is, as_it_is + n, wide);
  } else {
    widen(static_cast<const uint16_t*>(t.grad) + at, wide, n, t.grad_type);
  }
  if (t.factor != 1) {
    for (int64_t i = 0; i < n; i++) wide[i] *= t.factor;
  }
  return wide;
}

// ---- the loops, for the elements of one block
//
// The operators on lists are those of torch's `foreach` optimizers. Fused Adam and AdamW have options in FP32, averages
// as fma(b, m, fma(-b, g, g)), and CUDA's `powf` (`power`). Both kinds of SGD compute alike.

// Returns the gradient that a step uses: negated to maximize, and with L2 weight decay added.
template <int32_t Flags>
inline float gradient(float grad, float param, float decay) {
  if (Flags & kMaximize) grad = negated(grad);
  return Flags & kDecay ? __builtin_fmaf(param, decay, grad) : grad;
}

template <int32_t Flags>
void lists_adam(const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float *__restrict__ m = t.state[0] + at, *__restrict__ v = t.state[1] + at;
  float* __restrict__ largest = Flags & kAmsgrad ? t.state[2] + at : nullptr;
  const float decay = t.scalar[0], shrink = t.scalar[1], w1 = t.scalar[2], b2 = t.scalar[3], w2 = t.scalar[4];
  const float correction = t.scalar[5], eps = t.scalar[6], size = t.scalar[7];
  for (int64_t i = 0; i < n; i++) {
    const float grad = gradient<Flags>(g[i], p[i], decay);
    m[i] = lerp(m[i], grad, w1);
    float square = v[i] = addcmul(v[i] * b2, grad, grad, w2);
    if (Flags & kAmsgrad) square = largest[i] = largest[i] < square || square != square ? square : largest[i];
    const float shrunk = Flags & kDecoupled ? p[i] * shrink : p[i];
    p[i] = addcdiv(shrunk, m[i], std::sqrt(square) / correction + eps, size);
  }
}

template <int32_t Flags>
void fused_adam(const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float *__restrict__ m = t.state[0] + at, *__restrict__ v = t.state[1] + at;
  float* __restrict__ largest = Flags & kAmsgrad ? t.state[2] + at : nullptr;
  const float decay = t.scalar[0], rate = t.scalar[1], b1 = t.scalar[2], b2 = t.scalar[3], eps = t.scalar[4];
  const float size = t.scalar[5], correction = t.scalar[6];
  for (int64_t i = 0; i < n; i++) {
    const float shrunk = Flags & kDecoupled ? __builtin_fmaf(p[i], -(rate * decay), p[i]) : p[i];
    const float grad = gradient<Flags>(g[i], p[i], decay), product = grad * grad;
    m[i] = __builtin_fmaf(m[i], b1, __builtin_fmaf(grad, -b1, grad));
    float square = v[i] = __builtin_fmaf(v[i], b2, __builtin_fmaf(product, -b2, product));
    if (Flags & kAmsgrad) square = largest[i] = largest[i] < square ? square : largest[i];
    p[i] = shrunk - m[i] * size / (std::sqrt(square) / correction + eps);
  }
}

template <int32_t Flags>
void sgd(const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float* __restrict__ b = Flags & kMomentum ? t.state[0] + at : nullptr;
  const float decay = t.scalar[0], momentum = t.scalar[1], damped = t.scalar[2], rate = t.scalar[3];
  for (int64_t i = 0; i < n; i++) {
    float grad = gradient<Flags>(g[i], p[i], decay);
    if (Flags & kMomentum) {
      b[i] = Flags & kFirst ? grad : __builtin_fmaf(damped, grad, b[i] * momentum);
      grad = Flags & kNesterov ? __builtin_fmaf(b[i], momentum, grad) : b[i];
    }
    p[i] = __builtin_fmaf(grad, rate, p[i]);
  }
}

// CUDA's powf of a number from 0 to 1 and a whole exponent from 1 on: by a logarithm of two FP32 numbers.
float power(float base, float exponent) {
  if (base < 1e-30f) return exponent == 1 ? base : 0;
  int32_t bits;
  std::memcpy(&bits, &base, sizeof bits);
  const int32_t scale = (bits - 0x3f3504f3) & static_cast<int32_t>(0xff800000);  // base = 2 ** scale * near, near 1
  bits -= scale;
  float near;
  std::memcpy(&near, &bits, sizeof near);
  const float x = near - 1, inverse = 1 / (near + 1), u = inverse * (x + x), square = u * u, log2e = 1.4426950216293335f;
  const float rest = inverse * __builtin_fmaf(x, -u, (x - u) + (x - u)), whole = static_cast<float>(scale) * 0x1p-23f;
  const float first = __builtin_fmaf(u, log2e, whole);
  float low = __builtin_fmaf(rest, log2e, __builtin_fmaf(u, log2e, whole - first));
  low = __builtin_fmaf(u, 1.9251366722983221e-08f, low);
  float series = 0.0006568862590938807f;
  for (float c : {0.0032181653659790754f, 0.018033718690276146f, 0.12022458761930466f}) {
    series = __builtin_fmaf(square, series, c);
  }
  series *= square;
  low = __builtin_fmaf(u, series, __builtin_fmaf(rest, series * 3, low));
  const float high = first + low;  // the logarithm is high + low
  low -= high - first;
  const float product = exponent * high, turns = std::nearbyint(product);
  const float part = __builtin_fmaf(exponent, low, __builtin_fmaf(exponent, high, -product)) + (product - turns);
  float result = 0.00015239251661114395f;
  for (float c : {0.0013391353422775865f, 0.0096188392490148545f, 0.055503588169813156f, 0.24022644758224487f,
                  0.6931471824645996f, 1.f}) {
    result = __builtin_fmaf(result, part, c);
  }
  return static_cast<float>(std::ldexp(static_cast<double>(result), static_cast<int>(turns)));
}

// ---- from a request to its loop

using Loop = void (*)(const Tensors&, const float*, int64_t, int64_t);

// Returns the loop compiled for a kind and those of the flags that the kind knows, found flag by flag.
template <int32_t Kind, int32_t Flags, int32_t Next = 1>
Loop loop_of(int32_t flags) {
  constexpr int32_t own = kMaximize | kDecay | (Kind == kSgd ? kNesterov | kMomentum | kFirst : kDecoupled | kAmsgrad);
  if constexpr (Next <= kFirst) {
    if constexpr ((own & Next) != 0) {
      if (flags & Next) return loop_of<Kind, Flags | Next, Next * 2>(flags);
    }
    return loop_of<Kind, Flags, Next * 2>(flags);
  } else {
    if constexpr (Kind == kListsAdam) return lists_adam<Flags>;
    if constexpr (Kind == kFusedAdam) return fused_adam<Flags>;
    return sgd<Flags>;
  }
}

// Returns the loop for a request's kind and flags; nullptr for an unknown kind.
Loop loop_for(int32_t kind, int32_t flags) {
  switch (kind) {
    case kListsAdam: return loop_of<kListsAdam, 0>(flags);
    case kFusedAdam: return loop_of<kFusedAdam, 0>(flags);
    case kSgd: return loop_of<kSgd, 0>(flags);
  }
  return nullptr;
}

int64_t blocks_of(const Tensors& t) { return (t.count + kBlock - 1) / kBlock; }

}  // namespace

// Sets the function that runs a body on threads. Called before all other functions.
extern "C" void sp_lightning_use(Parallel parallel) { run_on_threads = parallel; }

// Steps all parameters of a request and returns 0; returns 1, with nothing done, if the request is unknown or the thread
// rounds oddly.
extern "C" int32_t sp_lightning_step(Request* request) {
  if (rounds_oddly()) return 1;
  const Loop loop = loop_for(request->kind, request->flags);
  if (loop == nullptr) return 1;
  int64_t total = 0;
  for (int64_t i = 0; i < request->count; i++) {
    if (!can_convert(request->tensors[i].wire_type) || !can_convert(request->tensors[i].grad_type)) return 1;
    total += blocks_of(request->tensors[i]);
  }
  std::atomic<int64_t> next{0};
  in_parallel(request->threads, [&] {
    alignas(64) float wide[kBlock];
    int64_t index = 0, first = 0;  // of this block's tensors; they only grow, as a thread takes blocks in ascending order
    for (int64_t taken; (taken = next.fetch_add(kTaken)) < total;) {
      for (int64_t block = taken; block < std::min(taken + kTaken, total); block++) {
        while (block - first >= blocks_of(request->tensors[index])) first += blocks_of(request->tensors[index++]);
        Tensors& tensors = request->tensors[index];
        const int64_t at = (block - first) * kBlock, n = std::min(kBlock, tensors.count - at);
        loop(tensors, gradient_of(tensors, at, n, wide), at, n);
        if (tensors.wire_type != kNone && convert(tensors.param + at, tensors.wire + at, n, tensors.wire_type)) {
          __atomic_store_n(&tensors.wire_has_nan, 1, __ATOMIC_RELAXED);
        }
      }
    }
    finish_stores();
  });
  request->done = 1;
  return 0;
}

// Computes the powers of fused Adam's betas as CUDA does: the step's size, and the root of the second average's correction.
extern "C" void sp_lightning_cuda_corrections(float rate, float beta1, float beta2, float step, float* out) {
  out[0] = rate / (1 - power(beta1, step));
  out[1] = std::sqrt(1 - power(beta2, step));
}
