"""A simulated accelerator for tests, as PyTorch device type ``simgpu``, on any Linux machine with a C++ compiler.

>>> import simgpu  # before any backward pass; compiles for half a minute the first time, see build.py
>>> torch.ones(3, device="simgpu"), torch.accelerator.current_stream(), torch.ones(3).pin_memory()

It has what code written for CUDA through ``torch.accelerator`` relies on, and fails where that would fail:

* Streams and events. Each stream is a worker thread with a FIFO queue; copies and kernels are queued and run later.
* Its own memory, with a capacity. Kernels are the CPU's on the same bytes, so results equal the CPU's bit for bit
  (up to rounding for LSTM and GRU). Queued work holds raw memory: a missing wait, memory freed or a pinned buffer
  overwritten too early, computes wrong numbers.
* An ordering checker. Two unordered accesses to the same memory, one of them a write, are reported whatever the
  timing happened to be: see ``races()``. The host's own accesses of pinned memory are among them (csrc/pages.h).
* Pinned memory, a caching allocator's counters, generators, autocast, autograd on the forward's streams.

``simgpu.config`` (a change holds for what is queued from then on):

============== ======= ==========================================================================================
``capacity``   2**30   bytes of device memory; beyond it, ``torch.OutOfMemoryError``
``check``      1       unordered accesses: 0 go unchecked, 1 are listed by ``races()``, 2 raise RuntimeError
``host``       True    check the host's accesses of pinned memory, too, be they torch's, NumPy's, compiled code's or
                       those of reads and writes in ``os``: none between the call of a copy and a wait for it
``poison``     True    fill memory with 0xFF (NaN) when it is allocated and freed
``sync``       False   run all work at once, as ``CUDA_LAUNCH_BLOCKING=1``
``h2d_us``     0       modelled time of a copy to the device, and
``h2d_gbps``   0       its bandwidth in GB/s (0: no limit); copies in one direction share one engine
``d2h_us``     0       the same of a copy from the device
``d2h_gbps``   0
``compute_us`` 0       modelled time of a kernel; streams do not share any
============== ======= ==========================================================================================

Known limits: one device; the first call of an operator that makes new tensors blocks the host, for each layout of its
arguments (warm up before asserting on overlap), and so does any whose output shape depends on data; all threads of the
host count as one, ordered by the wait of any; no graphs, no sparse or quantised tensors, no ``torch.compile``.
"""

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import types

import torch

from . import build

build.library()  # without which torch has no device of this name: its checkpoint would ask the one that it knows
torch.utils.rename_privateuse1_backend("simgpu")
_C = build.load()
config = _C.config()

_defaults = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}


def reset():
    """Waits for all queued work; then counters and peaks start anew, and ``config`` is as it was at first."""
    for name, value in _defaults.items():
        setattr(config, name, value)
    _note_stacks()
    error = _drain()
    _C.races()
    _C.reset_peak_stats()
    if error:
        raise error


def _drain():
    """The first error in queued work. Each stream keeps one of its own, so one wait may not have reported them all."""
    first = None
    while True:
        try:
            _C.synchronize()
            return first
        except RuntimeError as error:
            first = first or error


def races():
    """Descriptions of the unordered accesses found since the last call or ``reset()``."""
    return _C.races()


def pin(address, nbytes):
    """Makes memory of the caller's pinned, until ``unpin(address)``, as ``cudaHostRegister`` does."""
    _C.pin(address, nbytes)


def unpin(address):
    _C.unpin(address)


def pinned_bytes():
    """Bytes of pinned memory: (allocated, peak)."""
    return _C.pinned_bytes()


@contextlib.contextmanager
def hold(*streams):
    """What is queued on these streams (the current one, if none is given) within runs after it, so that a test does not
    depend on timing. Nothing within may wait for them."""
    release = [_C.hold(stream.stream_id) for stream in streams or [torch.accelerator.current_stream()]]
    try:
        yield
    finally:
        for f in release:
            f()


@contextlib.contextmanager
def cuda_arithmetic():
    """Optimizers and gradient norms of tensors on the device round as on CUDA: see csrc/cuda_arithmetic.h.

    Without it all operators are the CPU's. What is queued within rounds so, whenever it runs.
    """
    _C.cuda_arithmetic(True)
    try:
        yield
    finally:
        _C.cuda_arithmetic(False)


def _device_module():
    accelerator = torch.accelerator

    class device(accelerator.device_index):
        def __init__(self, device):
            super().__init__(device if isinstance(device, int) else torch.device(device).index or 0)

    def manual_seed_all(seed):
        _C.default_generator().manual_seed(seed)

    m = types.ModuleType("torch.simgpu")
    m.device = device
    m.is_available = m.is_initialized = m.is_bf16_supported = lambda: True
    m._initialized = True
    m.init = m._lazy_init = lambda: None
    m._is_in_bad_fork = lambda: os.getpid() != _pid  # asked by torch.manual_seed() in a DataLoader's workers
    m.device_count = lambda: 1
    m.current_device = lambda: 0
    m.set_device = accelerator.set_device_index
    m.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    m.Stream = lambda device="simgpu", **kwargs: torch.Stream(device=device, **kwargs)
    m.Event = lambda enable_timing=False, **kwargs: torch.Event("simgpu", enable_timing=enable_timing, **kwargs)
    m.stream = lambda stream: stream  # a context manager itself
    m.manual_seed = m.manual_seed_all = manual_seed_all
    m.get_rng_state = lambda device="simgpu": _C.default_generator().get_state()
    m.set_rng_state = lambda state, device="simgpu": _C.default_generator().set_state(state)
    names = "synchronize current_stream set_stream empty_cache memory_stats reset_peak_memory_stats"
    names += " memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    for name in names.split():
        setattr(m, name, getattr(accelerator, name))
    return m


def _checked(call, write):
    """A system call that reads or writes memory of its caller's: the kernel would refuse protected pages."""

    @functools.wraps(call)
    def checked(descriptor, memory, *arguments):
        if not config.host:
            return call(descriptor, memory, *arguments)
        buffers = memory if isinstance(memory, (list, tuple)) else [memory]
        opened = [_C.begin_system_call(buffer, write) for buffer in buffers]
        try:
            return call(descriptor, memory, *arguments)
        finally:
            for pages in opened:
                _C.end_system_call(pages)
            memory = buffers = arguments = None  # a traceback would hold buffers that their owner closes

    return checked


def _check_system_calls():
    for name in ("write", "writev", "pwrite", "pwritev", "readv", "preadv"):
        setattr(os, name, _checked(getattr(os, name), write="read" in name))
    _note_stacks()


def _note_stacks():
    """Has threads write down where they are, into a file of this process: a test may have taken signal or file away."""
    global _stacks
    try:
        os.fstat(_stacks)
    except OSError:
        _stacks = os.memfd_create("simgpu stacks")
    faulthandler.unregister(_STACK_SIGNAL)
    faulthandler.register(_STACK_SIGNAL, _stacks, all_threads=False)
    _C.note_stacks(_STACK_SIGNAL, _stacks)


@atexit.register
def _finish():  # queued work may be written in Python
    if os.getpid() == _pid:
        _C.synchronize()


_pid = os.getpid()
_stacks = -1  # the file
_STACK_SIGNAL = signal.SIGRTMAX - 1  # at which a thread writes down where it is
_check_system_calls()
sys.modules["torch.simgpu"] = _device_module()
torch._register_device_module("simgpu", sys.modules["torch.simgpu"])
torch.utils.generate_methods_for_privateuse1_backend()
