// Loops beside which host_optimizer.py measures the compiled step: the least that memory and a core allow.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

float wide(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

uint16_t narrow(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

// Reads and writes what a step of AdamW does: a gradient in bfloat16, weight and state, and the wire copy.
extern "C" void traffic(float* p, float* m, float* v, const uint16_t* g, uint16_t* wire, int64_t begin, int64_t end) {
#pragma GCC ivdep
  for (int64_t i = begin; i < end; i++) {
    const float grad = wide(g[i]);
    p[i] += grad;
    m[i] += grad;
    v[i] += grad;
    wire[i] = narrow(p[i]);
  }
}

// AdamW as a compiler makes it of the textbook's formula.
extern "C" void adam(float* p, float* m, float* v, const uint16_t* g, uint16_t* wire, int64_t begin, int64_t end) {
  const float shrink = 0.9999f, w1 = 0.1f, b2 = 0.999f, w2 = 0.001f, correction = 0.1f, eps = 1e-8f, size = -1e-3f;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; i++) {
    const float grad = wide(g[i]) * 0.5f;
    m[i] += w1 * (grad - m[i]);
    v[i] = v[i] * b2 + w2 * grad * grad;
    p[i] = p[i] * shrink + size * m[i] / (std::sqrt(v[i]) / correction + eps);
    wire[i] = narrow(p[i]);
  }
}
