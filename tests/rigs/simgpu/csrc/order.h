// The ordering checker: two accesses to a byte, one of them a write, must be ordered by program order on one stream, an
// event, or the host having waited. Vector clocks tell, whatever the timing happened to be.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace order {
using Clock = std::vector<uint64_t>;  // what a stream, an event or the host is ordered after: one counter a stream

inline void join(Clock& a, const Clock& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (size_t i = 0; i < b.size(); ++i) a[i] = std::max(a[i], b[i]);
}
inline bool covers(const Clock& clock, size_t stream, uint64_t tick) {
  return stream < clock.size() && clock[stream] >= tick;
}

struct Access {
  const char* begin;
  size_t size;
  bool write;
};

class History {
 public:
  // What a stream whose clock this is does next; gives the race, or nothing.
  std::string add(Clock& clock, size_t stream, const Clock& host, const std::string& op,
                  const std::vector<Access>& accesses) {
    std::string race;
    join(clock, host);
    if (clock.size() <= stream) clock.resize(stream + 1);
    const uint64_t tick = ++clock[stream];
    for (auto& a : accesses) {
      if (!a.size) continue;
      const char* end = a.begin + a.size;
      size_t kept = 0;
      for (auto& p : past_) {
        const bool overlap = p.begin < end && a.begin < p.end, ordered = covers(clock, p.stream, p.tick);
        if (overlap && !ordered && (p.write || a.write) && race.empty())
          race = op + (a.write ? " writes" : " reads") + " on stream " + std::to_string(stream) + " memory that " +
                 p.op + (p.write ? " writes" : " reads") + " on stream " + std::to_string(p.stream) +
                 " with no ordering between them";
        const bool superseded =
            overlap && ordered && a.begin <= p.begin && p.end <= end && (a.write || (!p.write && p.stream == stream));
        if (superseded) continue;
        if (&past_[kept] != &p) past_[kept] = std::move(p);
        ++kept;
      }
      past_.resize(kept);
      past_.push_back({a.begin, end, a.write, stream, tick, op});
    }
    if (past_.size() > 256)  // forget what the host, and so all work to come, is ordered after
      past_.erase(std::remove_if(past_.begin(), past_.end(), [&](auto& p) { return covers(host, p.stream, p.tick); }),
                  past_.end());
    return race;
  }

 private:
  struct Past {
    const char *begin = nullptr, *end = nullptr;
    bool write = false;
    size_t stream = 0;
    uint64_t tick = 0;
    std::string op;
  };
  std::vector<Past> past_;
};
}  // namespace order
