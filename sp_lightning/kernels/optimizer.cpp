// The steps of torch's default optimizer loops over many tensors in one parallel region, with the same bits.
//
// 1. Each element sees the operations of torch's loop in its order: what ATen's vectorized kernels contract into a fused
//    multiply-add is fused here (`Fused`), what they round twice is rounded twice. The compiler contracts nothing.
// 2. A root is torch's own. Where torch calls MKL's, roots are not correctly rounded and depend on the processor: `Root`
//    names the iterations that MKL is known to use, and MKL itself where none is. native.py picks by comparing bits.
// 3. All numbers of a block stay in the first-level cache between the passes over it: the second pass would else take as
//    long as memory does. Blocks are taken by whichever thread is free: a busy core slows only its own.
// 4. A block's wire copy (host_copy.py, Rule 5) is converted while the block is in the cache. Which NaN ATen makes of one
//    depends on where in a thread's share it lies: a copy in which there is any is reported, and ATen converts it.
// 5. Nothing is written before the whole request is known to be possible: a caller can step in another way instead.
// 6. Gradients are widened into memory whose second half they lie in (slab.py, Rule 2). Blocks are taken in
//    ascending order and read before they are written, and what a block is written over are blocks up to itself: it
//    waits until these have been read, and those never wait for a later one. Of NaNs in FP16, unlike those in bfloat16,
//    ATen makes several: it widens what has any.
// 7. Gradients may be in bfloat16, as they came down: a block's are widened while the block is in the cache, and
//    multiplied by the factor of clipping, if there is one.
// 8. The norm of a gradient is the root of sums that ATen has in as many lanes as a vector has numbers. How many those
//    are, and whether their products and those of the last numbers are fused, native.py finds by comparing bits.
// 9. The kinds from `kListsAdam` on round as CUDA's kernels do: see "CUDA's arithmetic".
//
// build.py compiles this file once for each set of instructions. Threads are those of torch's OpenMP, whose entry the
// loader passes in (`sp_lightning_use`), and no function of the C++ library is called: a library needs libc and libm alone.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 512;
constexpr int kTaken = 32;  // blocks at once: neighbouring blocks share pages

enum Kind : int32_t { kAdam, kSgd, kAdagrad, kRmsprop, kListsAdam, kFusedAdam, kCudaSgd };
enum Flag : int32_t {
  kMaximize = 1, kDecoupled = 2, kNesterov = 4, kCentered = 8, kMomentum = 16, kDecay = 32, kAmsgrad = 64, kFirst = 128
};
enum Wire : int32_t { kNone, kBFloat16, kFloat16, kWires };
enum Root : int32_t { kRounded, kNewton, kNewtonFused, kNewton14, kMkl, kRoots };

using MklRoot = void (*)(const int32_t* count, const float* in, float* out, const int64_t* mode);

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

struct Norm {
  const uint16_t* grad;
  int64_t count;
  float norm;
  int32_t unused;
};

struct Request {
  Tensors* tensors;
  int64_t count;
  int32_t kind, flags, root, fused, threads;
  MklRoot mkl;
  int32_t done;  // 1 once all is stepped
};

// ---- threads

using Parallel = void (*)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);  // GOMP_parallel

Parallel run_on_threads = nullptr;

// Runs the same body on so many threads at once. They share the work by a counter of the body's.
template <class Body>
void in_parallel(int64_t threads, Body body) {
  if (threads <= 1) return body();
  run_on_threads([](void* it) { (*static_cast<Body*>(it))(); }, &body, static_cast<unsigned>(threads), 0);
}

// Whether this thread rounds to another number than the nearest, or takes denormals for zero.
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

// ---- ATen's operations (Rule 1)

template <bool Fused>
inline float fma(float a, float b, float c) {
  return Fused ? __builtin_fmaf(a, b, c) : a * b + c;
}

template <bool Fused>
inline float add(float a, float b, float alpha) {
  return fma<Fused>(b, alpha, a);
}

template <bool Fused>
inline float addcmul(float a, float x, float y, float value) {
  return fma<Fused>(value * x, y, a);
}

// Of a NaN, too: a minus would be folded into a multiply-add, which keeps a NaN's sign.
inline float negated(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  bits ^= 0x80000000u;
  std::memcpy(&a, &bits, sizeof a);
  return a;
}

inline float addcdiv(float a, float x, float y, float value) { return a + value * x / y; }

template <bool Fused>
inline float lerp(float from, float to, float weight) {
  return std::fabs(weight) < 0.5f ? fma<Fused>(weight, to - from, from) : fma<Fused>(weight - 1, to - from, to);
}

// ---- roots (Rule 2)

const int64_t kMklMode = 0x2 | 0x140000 | 0x100;  // high accuracy, denormals as they are, no errors: as ATen asks

#if defined(__AVX2__) && defined(__FMA__)

// Whether all of x are zero or within [2^-100, 2^100]: there the iterations' steps neither overflow nor lose bits.
template <bool Fused>
bool newton(const float* x, float* out, int64_t n) {
  const __m256 half = _mm256_set1_ps(0.5f), zero = _mm256_setzero_ps();
  __m256i outside = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 8) {
    alignas(32) float rest[8];
    const int64_t m = std::min<int64_t>(8, n - i);
    if (m < 8) {
      std::fill(rest, rest + 8, 1.0f);
      std::copy(x + i, x + i + m, rest);
    }
    const __m256 a = _mm256_loadu_ps(m < 8 ? rest : x + i), y = _mm256_rsqrt_ps(a);
    __m256 s = _mm256_mul_ps(a, y), h = _mm256_mul_ps(y, half), r;
    if (Fused) {
      const __m256 e = _mm256_fnmadd_ps(s, h, half);
      s = _mm256_fmadd_ps(s, e, s);
      h = _mm256_fmadd_ps(h, e, h);
      r = _mm256_fmadd_ps(_mm256_fnmadd_ps(s, s, a), h, s);
    } else {
      const __m256 e = _mm256_sub_ps(half, _mm256_mul_ps(s, h));
      s = _mm256_add_ps(s, _mm256_mul_ps(s, e));
      h = _mm256_add_ps(h, _mm256_mul_ps(h, e));
      r = _mm256_add_ps(s, _mm256_mul_ps(_mm256_sub_ps(a, _mm256_mul_ps(s, s)), h));
    }
    const __m256 is_zero = _mm256_cmp_ps(a, zero, _CMP_EQ_OQ);
    const __m256i bits = _mm256_sub_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(27 << 23));
    // Unsigned: negative numbers, NaNs and infinities are large, too.
    const __m256i large = _mm256_cmpgt_epi32(_mm256_xor_si256(bits, _mm256_set1_epi32(INT32_MIN)),
                                             _mm256_set1_epi32(INT32_MIN + (200 << 23)));
    outside = _mm256_or_si256(outside, _mm256_andnot_si256(_mm256_castps_si256(is_zero), large));
    r = _mm256_blendv_ps(r, a, is_zero);
    _mm256_storeu_ps(m < 8 ? rest : out + i, r);
    if (m < 8) std::copy(rest, rest + m, out + i);
  }
  return _mm256_testz_si256(outside, outside);
}

#else
template <bool Fused>
bool newton(const float*, float*, int64_t) { return false; }
#endif

#if defined(__AVX512F__)

bool newton14(const float* x, float* out, int64_t n) {
  const __m512 half = _mm512_set1_ps(0.5f), zero = _mm512_setzero_ps();
  __mmask16 outside = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = n - i < 16 ? (1u << (n - i)) - 1 : 0xffff;
    const __m512 a = _mm512_maskz_loadu_ps(lanes, x + i), y = _mm512_rsqrt14_ps(a);
    const __m512 s = _mm512_mul_ps(a, y), h = _mm512_mul_ps(y, half);
    const __m512 r = _mm512_fmadd_ps(_mm512_fnmadd_ps(s, s, a), h, s);
    const __mmask16 not_zero = _mm512_cmp_ps_mask(a, zero, _CMP_NEQ_UQ);
    const __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(27 << 23));
    outside |= not_zero & _mm512_cmpgt_epu32_mask(bits, _mm512_set1_epi32(200 << 23));
    _mm512_mask_storeu_ps(out + i, lanes, _mm512_mask_blend_ps(not_zero, a, r));
  }
  return !outside;
}

#else
bool newton14(const float*, float*, int64_t) { return false; }
#endif

void take_roots(const Request& request, const float* x, float* out, int64_t n) {
  bool done = false;
  switch (request.root) {
    case kRounded:
      for (int64_t i = 0; i < n; i++) out[i] = std::sqrt(x[i]);
      return;
    case kNewton: done = newton<false>(x, out, n); break;
    case kNewtonFused: done = newton<true>(x, out, n); break;
    case kNewton14: done = newton14(x, out, n); break;
  }
  if (!done) {
    const int32_t count = static_cast<int32_t>(n);
    request.mkl(&count, x, out, &kMklMode);
  }
}

// ---- wire copies, rounded to the nearest even number (Rule 4)

#if defined(__AVX2__) && defined(__F16C__)
inline __m256i upper_halves(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, half)), 16);
}

inline __m256i rounded(__m256 a, __m256 b, int32_t type) {
  if (type == kFloat16) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(a, nearest)), _mm256_cvtps_ph(b, nearest), 1);
  }
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(upper_halves(a), upper_halves(b)), 0xd8);
}

// Returns whether there is a NaN.
bool convert(const float* in, uint16_t* out, int64_t n, int32_t type) {
  const bool past_the_cache = reinterpret_cast<uintptr_t>(out) % 32 == 0;  // nobody reads them soon
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

void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();  // past the cache: other threads read them after this one ended
#endif
}

bool can_convert(int32_t type) { return type >= kNone && type < kWires; }

// ---- gradients that came down in half precision (Rule 6)

#if defined(__AVX2__) && defined(__F16C__)
void widen(const uint16_t* in, float* out, int64_t n, int32_t type, bool past_the_cache) {
  past_the_cache = past_the_cache && reinterpret_cast<uintptr_t>(out) % 32 == 0;
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
    } else if (past_the_cache) {
      _mm256_stream_ps(out + i, wide);
    } else {
      _mm256_storeu_ps(out + i, wide);
    }
  }
}
#else
inline uint32_t wide_of(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return sign | 0x7f800000 | (rest & 0x3ff) << 13;
  if (rest >= 0x400) return sign | ((rest << 13) + 0x38000000);
  const float size = static_cast<float>(rest) * 0x1p-24f;
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  return sign | bits;
}

void widen(const uint16_t* in, float* out, int64_t n, int32_t type, bool) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = type == kFloat16 ? wide_of(in[i]) : static_cast<uint32_t>(in[i]) << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}
#endif

// Returns the gradients of a block, as they are if nothing is to be done, else made in a buffer in the first-level cache
// (Rule 7).
const float* gradient_of(const Tensors& t, int64_t at, int64_t n, float* wide) {
  if (t.grad_type == kNone) {
    const float* as_it_is = static_cast<const float*>(t.grad) + at;
    if (t.factor == 1) return as_it_is;
    std::copy(as_it_is, as_it_is + n, wide);
  } else {
    widen(static_cast<const uint16_t*>(t.grad) + at, wide, n, t.grad_type, false);
  }
  if (t.factor != 1) {
    for (int64_t i = 0; i < n; i++) wide[i] *= t.factor;
  }
  return wide;
}

// ---- norms (Rule 8)

inline float upper(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// The numbers behind the last vector are summed one by one. Where a compiler computes `End` products at once, only those
// of the numbers behind these are fused.
template <int Lanes, bool Fused, int End>
float norm_of(const uint16_t* in, int64_t n) {
  if (n == 1) return std::fabs(upper(in[0]));
  alignas(64) float sums[Lanes] = {};
  int64_t i = 0;
  for (; i + Lanes <= n; i += Lanes) {
    for (int lane = 0; lane < Lanes; lane++) {
      const float x = upper(in[i + lane]);
      sums[lane] = fma<Fused>(x, x, sums[lane]);
    }
  }
  float sum = sums[0];
  for (int lane = 1; lane < Lanes; lane++) sum += sums[lane];
  const int64_t end = n - (n - i) % End;
  for (; i < end; i++) sum += upper(in[i]) * upper(in[i]);
  for (; i < n; i++) sum = __builtin_fmaf(upper(in[i]), upper(in[i]), sum);
  return std::sqrt(sum);
}

using NormOf = float (*)(const uint16_t*, int64_t);

template <int Lanes>
constexpr NormOf kNorms[] = {
    norm_of<Lanes, false, 1>, norm_of<Lanes, false, 2>, norm_of<Lanes, false, 4>, norm_of<Lanes, false, Lanes>,
    norm_of<Lanes, true, 1>,  norm_of<Lanes, true, 2>,  norm_of<Lanes, true, 4>,  norm_of<Lanes, true, Lanes>,
};

// ---- the loops, for the elements of one block

template <bool Fused, int32_t Flags>
inline float gradient(float grad, float param, float decay) {
  if (Flags & kMaximize) grad = negated(grad);
  return Flags & kDecay ? add<Fused>(grad, param, decay) : grad;
}

template <bool Fused, int32_t Flags>
void adam(const Request& request, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float *__restrict__ m = t.state[0] + at, *__restrict__ v = t.state[1] + at;
  const float decay = t.scalar[0], shrink = t.scalar[1], w1 = t.scalar[2], b2 = t.scalar[3], w2 = t.scalar[4];
  const float correction = t.scalar[5], eps = t.scalar[6], size = t.scalar[7];
  alignas(64) float root[kBlock];
  for (int64_t i = 0; i < n; i++) {
    const float grad = gradient<Fused, Flags>(g[i], p[i], decay);
    m[i] = lerp<Fused>(m[i], grad, w1);
    v[i] = addcmul<Fused>(v[i] * b2, grad, grad, w2);
  }
  take_roots(request, v, root, n);
  for (int64_t i = 0; i < n; i++) {
    const float shrunk = Flags & kDecoupled ? p[i] * shrink : p[i];
    p[i] = addcdiv(shrunk, m[i], root[i] / correction + eps, size);
  }
}

template <bool Fused, int32_t Flags>
void sgd(const Request&, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float* __restrict__ b = t.state[0] + at;
  const float decay = t.scalar[0], momentum = t.scalar[1], damped = t.scalar[2], rate = t.scalar[3];
  for (int64_t i = 0; i < n; i++) {
    float grad = gradient<Fused, Flags>(g[i], p[i], decay);
    b[i] = add<Fused>(b[i] * momentum, grad, damped);
    grad = Flags & kNesterov ? add<Fused>(grad, b[i], momentum) : b[i];
    p[i] = add<Fused>(p[i], grad, rate);
  }
}

template <bool Fused, int32_t Flags>
void adagrad(const Request& request, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float* __restrict__ sum = t.state[0] + at;
  const float decay = t.scalar[0], eps = t.scalar[1], rate = t.scalar[2];
  alignas(64) float root[kBlock];
  for (int64_t i = 0; i < n; i++) {
    const float grad = gradient<Fused, Flags>(g[i], p[i], decay);
    sum[i] = addcmul<Fused>(sum[i], grad, grad, 1);
  }
  take_roots(request, sum, root, n);
  for (int64_t i = 0; i < n; i++) p[i] = addcdiv(p[i], gradient<Fused, Flags>(g[i], p[i], decay), root[i] + eps, rate);
}

template <bool Fused, int32_t Flags>
void rmsprop(const Request& request, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float *__restrict__ square = t.state[0] + at, *__restrict__ b = t.state[1] + at, *__restrict__ mean = t.state[2] + at;
  const float decay = t.scalar[0], alpha = t.scalar[1], w = t.scalar[2], eps = t.scalar[3];
  const float momentum = t.scalar[4], rate = t.scalar[5];
  alignas(64) float root[kBlock], centered[kBlock];
  for (int64_t i = 0; i < n; i++) {
    const float grad = gradient<Fused, Flags>(g[i], p[i], decay);
    square[i] = addcmul<Fused>(square[i] * alpha, grad, grad, w);
    if (Flags & kCentered) {
      mean[i] = lerp<Fused>(mean[i], grad, w);
      centered[i] = addcmul<Fused>(square[i], mean[i], mean[i], -1);
    }
  }
  take_roots(request, Flags & kCentered ? centered : square, root, n);
  for (int64_t i = 0; i < n; i++) {
    const float grad = gradient<Fused, Flags>(g[i], p[i], decay);
    if (Flags & kMomentum) {
      b[i] = addcdiv(b[i] * momentum, grad, root[i] + eps, 1);
      p[i] = add<Fused>(p[i], b[i], rate);
    } else {
      p[i] = addcdiv(p[i], grad, root[i] + eps, rate);
    }
  }
}

// ---- CUDA's arithmetic (Rule 9)
//
// A product contracts with the sum that follows; quotients and roots round correctly. The operators on lists are those
// of torch's `foreach` optimizers. Fused Adam and AdamW have options in FP32, averages as fma(b, m, fma(-b, g, g)), and
// CUDA's `powf` (`power`). Both kinds of SGD compute alike.

inline float cuda_addcmul(float a, float x, float y, float value) {
  return value == 1 ? __builtin_fmaf(x, y, a) : __builtin_fmaf(value, x * y, a);
}

inline float cuda_addcdiv(float a, float x, float y, float value) {
  return value == 1 ? a + x / y : __builtin_fmaf(value, x / y, a);
}

template <int32_t Flags>
void lists_adam(const Request&, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float *__restrict__ m = t.state[0] + at, *__restrict__ v = t.state[1] + at;
  float* __restrict__ largest = Flags & kAmsgrad ? t.state[2] + at : nullptr;
  const float decay = t.scalar[0], shrink = t.scalar[1], w1 = t.scalar[2], b2 = t.scalar[3], w2 = t.scalar[4];
  const float correction = t.scalar[5], eps = t.scalar[6], size = t.scalar[7];
  for (int64_t i = 0; i < n; i++) {
    const float grad = gradient<true, Flags>(g[i], p[i], decay);
    m[i] = lerp<true>(m[i], grad, w1);
    float square = v[i] = cuda_addcmul(v[i] * b2, grad, grad, w2);
    if (Flags & kAmsgrad) square = largest[i] = largest[i] < square || square != square ? square : largest[i];
    const float shrunk = Flags & kDecoupled ? p[i] * shrink : p[i];
    p[i] = cuda_addcdiv(shrunk, m[i], std::sqrt(square) / correction + eps, size);
  }
}

template <int32_t Flags>
void fused_adam(const Request&, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float *__restrict__ m = t.state[0] + at, *__restrict__ v = t.state[1] + at;
  float* __restrict__ largest = Flags & kAmsgrad ? t.state[2] + at : nullptr;
  const float decay = t.scalar[0], rate = t.scalar[1], b1 = t.scalar[2], b2 = t.scalar[3], eps = t.scalar[4];
  const float size = t.scalar[5], correction = t.scalar[6];
  for (int64_t i = 0; i < n; i++) {
    const float shrunk = Flags & kDecoupled ? __builtin_fmaf(p[i], -(rate * decay), p[i]) : p[i];
    const float grad = gradient<true, Flags>(g[i], p[i], decay), product = grad * grad;
    m[i] = __builtin_fmaf(m[i], b1, __builtin_fmaf(grad, -b1, grad));
    float square = v[i] = __builtin_fmaf(v[i], b2, __builtin_fmaf(product, -b2, product));
    if (Flags & kAmsgrad) square = largest[i] = largest[i] < square ? square : largest[i];
    p[i] = shrunk - m[i] * size / (std::sqrt(square) / correction + eps);
  }
}

template <int32_t Flags>
void cuda_sgd(const Request&, const Tensors& t, const float* __restrict__ g, int64_t at, int64_t n) {
  float* __restrict__ p = t.param + at;
  float* __restrict__ b = Flags & kMomentum ? t.state[0] + at : nullptr;
  const float decay = t.scalar[0], momentum = t.scalar[1], damped = t.scalar[2], rate = t.scalar[3];
  for (int64_t i = 0; i < n; i++) {
    float grad = gradient<true, Flags>(g[i], p[i], decay);
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

using Loop = void (*)(const Request&, const Tensors&, const float*, int64_t, int64_t);

template <int32_t Kind, bool Fused, int32_t Flags, int32_t Next = 1>
Loop loop_of(int32_t flags) {
  constexpr int32_t own = kMaximize | kDecay | (Kind == kAdam      ? kDecoupled
                                                : Kind == kSgd     ? kNesterov
                                                : Kind == kRmsprop ? kCentered | kMomentum
                                                : Kind == kCudaSgd ? kNesterov | kMomentum | kFirst
                                                : Kind >= kListsAdam ? kDecoupled | kAmsgrad
                                                                     : 0);
  if constexpr (Next <= kFirst) {
    if constexpr ((own & Next) != 0) {
      if (flags & Next) return loop_of<Kind, Fused, Flags | Next, Next * 2>(flags);
    }
    return loop_of<Kind, Fused, Flags, Next * 2>(flags);
  } else {
    if constexpr (Kind == kAdam) return adam<Fused, Flags>;
    if constexpr (Kind == kSgd) return sgd<Fused, Flags>;
    if constexpr (Kind == kAdagrad) return adagrad<Fused, Flags>;
    if constexpr (Kind == kListsAdam) return lists_adam<Flags>;
    if constexpr (Kind == kFusedAdam) return fused_adam<Flags>;
    if constexpr (Kind == kCudaSgd) return cuda_sgd<Flags>;
    return rmsprop<Fused, Flags>;
  }
}

template <bool Fused>
Loop loop_for(int32_t kind, int32_t flags) {
  switch (kind) {
    case kAdam: return loop_of<kAdam, Fused, 0>(flags);
    case kSgd: return loop_of<kSgd, Fused, 0>(flags);
    case kAdagrad: return loop_of<kAdagrad, Fused, 0>(flags);
    case kRmsprop: return loop_of<kRmsprop, Fused, 0>(flags);
    case kListsAdam: return loop_of<kListsAdam, true, 0>(flags);
    case kFusedAdam: return loop_of<kFusedAdam, true, 0>(flags);
    case kCudaSgd: return loop_of<kCudaSgd, true, 0>(flags);
  }
  return nullptr;
}

int64_t blocks_of(const Tensors& t) { return (t.count + kBlock - 1) / kBlock; }

}  // namespace

// Is called before all others.
extern "C" void sp_lightning_use(Parallel parallel) { run_on_threads = parallel; }

// Returns 0, or 1 if nothing was done because the processor's rounding is not the usual one, or the request is unknown.
extern "C" int32_t sp_lightning_step(Request* request) {
  if (rounds_oddly()) return 1;
  const Loop loop = request->fused ? loop_for<true>(request->kind, request->flags)
                                   : loop_for<false>(request->kind, request->flags);
  if (loop == nullptr || (request->root != kRounded && request->mkl == nullptr)) return 1;
  int64_t total = 0;
  for (int64_t i = 0; i < request->count; i++) {
    if (!can_convert(request->tensors[i].wire_type) || !can_convert(request->tensors[i].grad_type)) return 1;
    total += blocks_of(request->tensors[i]);
  }
  std::atomic<int64_t> next{0};
  in_parallel(request->threads, [&] {
    alignas(64) float wide[kBlock];
    int64_t index = 0, first = 0;  // a thread is given blocks in ascending order
    for (int64_t taken; (taken = next.fetch_add(kTaken)) < total;) {
      for (int64_t block = taken; block < std::min(taken + kTaken, total); block++) {
        while (block - first >= blocks_of(request->tensors[index])) first += blocks_of(request->tensors[index++]);
        Tensors& tensors = request->tensors[index];
        const int64_t at = (block - first) * kBlock, n = std::min(kBlock, tensors.count - at);
        loop(*request, tensors, gradient_of(tensors, at, n, wide), at, n);
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

// Computes the norms of gradients in bfloat16, each on one thread. Returns 0, or 1 as above.
extern "C" int32_t sp_lightning_norms(Norm* norms, int64_t count, int32_t lanes, int32_t fused, int32_t threads) {
  if (rounds_oddly()) return 1;
  if (lanes != 4 && lanes != 8 && lanes != 16) return 1;
  const NormOf norm = (lanes == 4 ? kNorms<4> : lanes == 8 ? kNorms<8> : kNorms<16>)[fused];
  std::atomic<int64_t> next{0};
  in_parallel(threads, [&] {
    for (int64_t i; (i = next.fetch_add(1)) < count;) norms[i].norm = norm(norms[i].grad, norms[i].count);
  });
  return 0;
}

extern "C" void sp_lightning_root(const Request* request, const float* in, float* out, int64_t count) {
  for (int64_t at = 0; at < count; at += kBlock) take_roots(*request, in + at, out + at, std::min(kBlock, count - at));
}

// Returns whether it can.
extern "C" int32_t sp_lightning_convert(const float* in, uint16_t* out, int64_t count, int32_t type) {
  if (can_convert(type)) convert(in, out, count, type);
  finish_stores();
  return can_convert(type);
}

// Widens numbers that lie in the second half of the memory that they are widened into, or behind it. Returns whether it
// did. Numbers that go past the cache are not read into it first.
extern "C" int32_t sp_lightning_widen(const uint16_t* in, float* out, int64_t count, int32_t type, int32_t threads,
                                      int32_t past_the_cache) {
  constexpr int64_t size = kBlock * kTaken;
  const int64_t blocks = (count + size - 1) / size;
  const int64_t ahead = (reinterpret_cast<intptr_t>(in) - reinterpret_cast<intptr_t>(out)) / 2;  // in numbers of `in`
  if (type == kNone || !can_convert(type) || ahead < count || count <= 0) return false;
  const int64_t sharers = std::min<int64_t>(threads, blocks);
  std::atomic<int64_t> next{0};
  if (type == kFloat16) {
    std::atomic<bool> nan{false};
    in_parallel(sharers, [&] {
      for (int64_t block; (block = next.fetch_add(1)) < blocks;) {
        bool found = false;
        for (int64_t i = block * size; i < std::min(count, (block + 1) * size); i++) found |= (in[i] & 0x7fff) > 0x7c00;
        if (found) nan.store(true, std::memory_order_relaxed);
      }
    });
    if (nan.load()) return false;
    next.store(0);
  }
  auto* read = static_cast<std::atomic<bool>*>(std::calloc(blocks, sizeof(std::atomic<bool>)));
  if (read == nullptr) return false;
  in_parallel(sharers, [&] {
    for (int64_t block; (block = next.fetch_add(1)) < blocks;) {
      alignas(64) uint16_t own[size];
      const int64_t at = block * size, n = std::min(size, count - at);
      std::copy(in + at, in + at + n, own);
      read[block].store(true, std::memory_order_release);
      const int64_t first = std::max<int64_t>(2 * at - ahead, 0), last = 2 * (at + n) - ahead;  // of what is written over
      for (int64_t other = first / size; other * size < last; other++) {
        while (!read[other].load(std::memory_order_acquire)) sched_yield();
      }
      widen(own, out + at, n, type, past_the_cache);
    }
    finish_stores();
  });
  std::free(read);
  return true;
}
