// The host's own accesses of page-locked memory, whoever makes them: torch's kernels, NumPy, compiled code, system calls.
//
// From when a copy is queued until the host has *waited* for it (the clocks say so, not the time), the pages of its host
// memory are protected: read-only while a copy to the device reads them, no access while a copy to the host writes them.
// An access faults; the handler looks its bytes up in the ranges that copies use, notes the race with the thread's
// Python stack, and lets it go on. Copies themselves go through /proc/self/mem, which no protection stops.
//
// * Bytes beside a copy's, in a page that it covers in part, may be used: that one instruction runs with the page open
//   and the processor's trap flag set, after which the page is closed again (x86-64; elsewhere the page stays open).
// * A system call gets EFAULT for a protected page. `begin_system_call` checks the bytes first and opens the pages until
//   `end_system_call`; __init__.py calls them around what Python's `os` has of reads and writes with buffers.
// * The handlers take no lock that a faulting thread may hold and allocate nothing: all tables here have fixed sizes.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "order.h"

namespace pages {
inline const uintptr_t page_size = sysconf(_SC_PAGESIZE);
inline uintptr_t down(uintptr_t at) { return at & ~(page_size - 1); }
inline uintptr_t up(uintptr_t at) { return down(at + page_size - 1); }

struct Range {
  uintptr_t begin, end;
  bool overlaps(uintptr_t from, uintptr_t to) const { return begin < to && from < end; }
};
struct Block {  // page-locked memory, and those of its pages that nothing else is on
  Range bytes, pages;
};
struct Use {  // by a queued copy that the host has not waited for
  Range bytes, pages;
  bool write;
  size_t stream;
  uint64_t tick;
  char op[24];
};
struct Found {
  Use use;
  uintptr_t address;
  bool write;
  off_t stack_begin, stack_end;
};

template <class T, size_t N>
struct Table {  // of no order
  T items[N];
  size_t count = 0;
  bool add(const T& item) {
    if (count == N) return false;
    items[count++] = item;
    return true;
  }
  void remove(size_t i) { items[i] = items[--count]; }
  T* begin() { return items; }
  T* end() { return items + count; }
};

class Spin {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};
struct Locked {
  Spin& spin;
  explicit Locked(Spin& s) : spin(s) { spin.lock(); }
  ~Locked() { spin.unlock(); }
};

inline Spin spin;  // guards the tables; nobody who holds it touches page-locked memory
inline Table<Block, 1 << 16> blocks;
inline Table<Use, 1 << 14> uses;
inline Table<Range, 256> opened;  // pages that are open whatever is copied
inline Table<Found, 100> found;
inline order::Clock& waited = *new order::Clock;  // what the host has waited for; guarded by the clocks' mutex
inline bool forked = false;
inline int stack_signal = 0, stack_file = -1;  // makes Python's faulthandler write the thread's stack to the file
#define SIMGPU_IN_HANDLERS static thread_local __attribute__((tls_model("initial-exec")))
SIMGPU_IN_HANDLERS bool on_device = false;  // this thread is a stream: what it does is ordered by the history
SIMGPU_IN_HANDLERS uintptr_t stepping[8];   // pages that are open for one instruction of this thread
SIMGPU_IN_HANDLERS int steps = 0;
#undef SIMGPU_IN_HANDLERS

constexpr int kOpen = PROT_READ | PROT_WRITE;
inline void protect(uintptr_t begin, uintptr_t end) {  // as the tables say
  for (uintptr_t at = begin, next; at < end; at = next) {
    int allowed = kOpen;
    bool open = false;
    next = end;
    auto covers = [&](const Range& r) {
      if (r.begin > at) next = std::min(next, r.begin);
      if (r.begin > at || r.end <= at) return false;
      next = std::min(next, r.end);
      return true;
    };
    for (auto& u : uses)
      if (covers(u.pages)) allowed &= u.write ? PROT_NONE : PROT_READ;
    for (auto& r : opened) open |= covers(r);
    mprotect((void*)at, next - at, open ? kOpen : allowed);
  }
}

// ---- faults
inline void note(size_t use, uintptr_t address, bool write) {  // once for each copy: then its memory is free
  const Use u = uses.items[use];
  uses.remove(use);
  protect(u.pages.begin, u.pages.end);
  Found f{u, address, write, 0, 0};
  struct sigaction told;
  if (stack_signal && !sigaction(stack_signal, nullptr, &told) && told.sa_handler != SIG_DFL) {
    f.stack_begin = lseek(stack_file, 0, SEEK_CUR);
    pthread_kill(pthread_self(), stack_signal);
    f.stack_end = lseek(stack_file, 0, SEEK_CUR);
  }
  found.add(f);
}

inline struct sigaction before_us[2];  // for SIGSEGV, SIGTRAP
inline void leave_to(const struct sigaction& other, int number) { sigaction(number, &other, nullptr); }

inline bool is_write(const ucontext_t* c, uintptr_t page) {
#if defined(__x86_64__)
  return c->uc_mcontext.gregs[REG_ERR] & 2;
#else  // what is written there can be told from reads only where reads are allowed
  for (auto& u : uses)
    if (u.write && u.pages.overlaps(page, page + page_size)) return false;
  return true;
#endif
}
// Bytes that the faulting instruction reads or writes: those of the vector moves and packed arithmetic that compilers and
// libc make, else 1. Only where an access begins beside a copy's bytes and ends in them does it decide.
inline size_t access_size(const ucontext_t* c) {
#if defined(__x86_64__)
  const uint8_t* at = (const uint8_t*)c->uc_mcontext.gregs[REG_RIP];
  auto is_move = [](uint8_t op) { return op == 0x10 || op == 0x11 || op == 0x28 || op == 0x29 || op == 0x2b; };
  auto is_integer_move = [](uint8_t op) { return op == 0x6f || op == 0x7f || op == 0xe7; };
  auto is_arithmetic = [](uint8_t op) { return op == 0x51 || (op >= 0x54 && op <= 0x5f && op != 0x5a && op != 0x5b); };
  auto is_fused = [](uint8_t op) { return op >= 0x96 && op <= 0xbf && (op & 0xf) >= 6; };
  auto size = [&](int map, int prefix, uint8_t op, size_t vector) -> size_t {  // prefix: none, 66, F3, F2
    if (map == 2 && prefix == 1 && is_fused(op)) return (op & 0xf) < 8 || !(op & 1) ? vector : 1;
    if (map != 1) return 1;
    if (is_integer_move(op)) return vector;
    if (!is_move(op) && !is_arithmetic(op)) return 1;
    return prefix == 2 ? 4 : prefix == 3 ? 8 : vector;
  };
  if (at[0] == 0xc5) return size(1, at[1] & 3, at[2], at[1] & 4 ? 32 : 16);
  if (at[0] == 0xc4) return size(at[1] & 31, at[2] & 3, at[3], at[2] & 4 ? 32 : 16);
  if (at[0] == 0x62) return at[3] & 16 ? 1 : size(at[1] & 7, at[2] & 3, at[4], 16 << (at[3] >> 5 & 3));
  int prefix = 0;
  bool wide = false;
  for (; *at == 0x66 || *at == 0xf3 || *at == 0xf2; ++at) prefix = *at == 0x66 ? 1 : *at == 0xf3 ? 2 : 3;
  if ((*at & 0xf0) == 0x40) wide = *at++ & 8;
  if (*at == 0x0f) return size(1, prefix, at[1], 16);
  if (*at == 0x89 || *at == 0x8b) return wide ? 8 : prefix == 1 ? 2 : 4;
#endif
  return 1;
}
inline void step_over(ucontext_t* c, uintptr_t page) {
#if defined(__x86_64__)
  if (steps < (int)std::size(stepping)) {
    mprotect((void*)page, page_size, kOpen);
    stepping[steps++] = page;
    c->uc_mcontext.gregs[REG_EFL] |= 0x100;
    return;
  }
#endif
  opened.add({page, page + page_size});
  protect(page, page + page_size);
}

inline void on_fault(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const uintptr_t address = (uintptr_t)info->si_addr, page = down(address);
  if (forked) {  // owns copies of the pages
    if (mprotect((void*)page, page_size, kOpen)) leave_to(before_us[0], number);
    return;
  }
  Locked l(spin);
  const bool ours = info->si_code == SEGV_ACCERR && std::any_of(blocks.begin(), blocks.end(), [&](auto& b) {
                      return b.pages.overlaps(address, address + 1);
                    });
  if (!ours) return leave_to(before_us[0], number);
  const bool write = is_write((ucontext_t*)context, page);
  const uintptr_t end = address + (address == page ? 1 : access_size((ucontext_t*)context));  // it may begin before a page
  bool held_back = false;  // by what is copied now; else by what was when it faulted, and it may go on
  for (size_t i = 0; i < uses.count; ++i) {
    const Use& u = uses.items[i];
    if (!u.pages.overlaps(address, address + 1) || !(u.write || write)) continue;
    if (!on_device && u.bytes.overlaps(address, end)) note(i--, std::max(address, u.bytes.begin), write);
    else held_back = true;
  }
  if (held_back) step_over((ucontext_t*)context, page);
  else protect(page, page + page_size);
  errno = error;
}
inline void on_step(int number, siginfo_t*, void* context) {
#if defined(__x86_64__)
  if (!steps) return leave_to(before_us[1], number);
  Locked l(spin);
  while (steps) {
    const uintptr_t page = stepping[--steps];
    protect(page, page + page_size);
  }
  ((ucontext_t*)context)->uc_mcontext.gregs[REG_EFL] &= ~0x100LL;
#endif
}

inline void install(int number, void (*handler)(int, siginfo_t*, void*), struct sigaction& before) {
  struct sigaction now;
  sigaction(number, nullptr, &now);
  if (now.sa_sigaction == handler) return;
  before = now;
  struct sigaction ours = {};
  ours.sa_sigaction = handler;
  ours.sa_flags = SA_SIGINFO;  // on the thread's own stack: the alternative one is short, and the next signal's
  sigaction(number, &ours, nullptr);
}
inline const int at_fork = pthread_atfork([] { spin.lock(); }, [] { spin.unlock(); },
                                          [] {
                                            forked = true;
                                            for (auto& u : uses)
                                              mprotect((void*)u.pages.begin, u.pages.end - u.pages.begin, kOpen);
                                            spin.unlock();
                                          });

// ---- page-locked memory comes and goes
inline void add_block(const void* p, size_t n) {
  const uintptr_t begin = (uintptr_t)p, end = begin + n;
  const bool own = begin == down(begin);  // a mapping: nothing else is on its last page
  Locked l(spin);
  blocks.add({{begin, end}, {up(begin), std::max(up(begin), own ? up(end) : down(end))}});
}
inline void remove_block(const void* p) {
  Locked l(spin);
  for (size_t i = 0; i < blocks.count; ++i) {
    const Block b = blocks.items[i];
    if (b.bytes.begin != (uintptr_t)p) continue;
    for (size_t j = uses.count; j-- > 0;)
      if (uses.items[j].bytes.overlaps(b.bytes.begin, b.bytes.end)) uses.remove(j);
    for (size_t j = opened.count; j-- > 0;)
      if (opened.items[j].overlaps(b.pages.begin, b.pages.end)) opened.remove(j);
    protect(b.pages.begin, b.pages.end);
    return blocks.remove(i);
  }
}

// ---- copies
inline void begin_use(const order::Access& a, size_t stream, uint64_t tick, const std::string& op) {
  install(SIGSEGV, on_fault, before_us[0]);
  install(SIGTRAP, on_step, before_us[1]);
  Use u{{(uintptr_t)a.begin, (uintptr_t)a.begin + a.size}, {}, a.write, stream, tick, {}};
  strncpy(u.op, op.c_str(), sizeof u.op - 1);
  Locked l(spin);
  for (auto& b : blocks)
    if (b.bytes.overlaps(u.bytes.begin, u.bytes.end))
      u.pages = {std::max(down(u.bytes.begin), b.pages.begin), std::min(up(u.bytes.end), b.pages.end)};
  if (u.pages.begin < u.pages.end && uses.add(u)) protect(u.pages.begin, u.pages.end);
}
inline void end_uses() {  // of what the host has waited for
  Locked l(spin);
  for (size_t i = uses.count; i-- > 0;) {
    const Use u = uses.items[i];
    if (!order::covers(waited, u.stream, u.tick)) continue;
    uses.remove(i);
    protect(u.pages.begin, u.pages.end);
  }
}

inline void open_pages(const Range& pages) {
  Locked l(spin);
  opened.add(pages);
  protect(pages.begin, pages.end);
}
inline void close_pages(const Range& pages) {
  Locked l(spin);
  for (size_t i = 0; i < opened.count; ++i)
    if (opened.items[i].begin == pages.begin && opened.items[i].end == pages.end) {
      opened.remove(i);
      return protect(pages.begin, pages.end);
    }
}

inline int memory_file() {
  static const int file = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  return file;
}
// What a copy does once it is its turn; `host` may be protected.
inline void copy(char* device, char* host, size_t n, bool to_host) {
  size_t done = 0;
  for (ssize_t moved = 1; done < n && moved > 0; done += moved > 0 ? moved : 0)
    moved = to_host ? pwrite(memory_file(), device + done, n - done, (off_t)(host + done))
                    : pread(memory_file(), device + done, n - done, (off_t)(host + done));
  if (done == n) return;
  const Range pages{down((uintptr_t)host), up((uintptr_t)host + n)};  // no such file, or a mapping that it can't write
  open_pages(pages);
  to_host ? memcpy(host + done, device + done, n - done) : memcpy(device + done, host + done, n - done);
  close_pages(pages);
}

// ---- the host's system calls
inline Range begin_system_call(const void* p, size_t n, bool write) {
  const uintptr_t begin = (uintptr_t)p, end = begin + n;
  Range touched{down(begin), up(end)};
  Locked l(spin);
  bool held_back = false;
  for (size_t i = 0; i < uses.count; ++i) {
    const Use& u = uses.items[i];
    if (!u.pages.overlaps(touched.begin, touched.end) || !(u.write || write)) continue;
    if (u.bytes.overlaps(begin, end)) note(i--, std::max(begin, u.bytes.begin), write);
    else held_back = true;
  }
  if (!held_back) return {0, 0};
  opened.add(touched);
  protect(touched.begin, touched.end);
  return touched;
}
inline void end_system_call(const Range& touched) {
  if (touched.end) close_pages(touched);
}

inline std::vector<std::string> races() {  // found since the last call
  std::vector<Found> taken;
  taken.reserve(std::size(found.items));
  {
    Locked l(spin);
    taken.assign(found.begin(), found.end());
    found.count = 0;
  }
  std::vector<std::string> told;
  for (auto& f : taken) {
    std::string stack(f.stack_end - f.stack_begin, '\0');
    stack.resize(std::max<ssize_t>(0, pread(stack_file, stack.data(), stack.size(), f.stack_begin)));
    size_t shown = 0;
    for (int lines = 0; lines < 12 && shown < stack.size(); ++lines) shown = stack.find('\n', shown) + 1;
    stack.resize(shown);
    told.push_back(std::string("simgpu race: the host ") + (f.write ? "writes" : "reads") + " memory that " + f.use.op +
                   (f.use.write ? " writes" : " reads") + " on stream " + std::to_string(f.use.stream) +
                   ", for which it has not waited (byte " + std::to_string(f.address - f.use.bytes.begin) + " of " +
                   std::to_string(f.use.bytes.end - f.use.bytes.begin) + ")" + (stack.empty() ? "" : "\n") + stack);
  }
  return told;
}
}  // namespace pages
