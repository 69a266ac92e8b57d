"""The speeds and sizes of a machine that planning needs, and profiles of well-known machines.

Profiles are datasheet peaks times the fraction that long-running work is assumed to reach, stated once below. Use them
to plan for a machine that is not at hand. Measure a machine that is: hosts differ more than devices do.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

# Assumed shares of the peaks.
SUSTAINED_FLOPS = 0.6  # of dense bf16 with FP32 accumulation, in large matrix products and what surrounds them
SUSTAINED_DRAM = 0.7  # of one socket's memory channels, read and written by the optimizer
DUPLEX = 0.85  # of its bandwidth, in each direction while both run; 0.5 on some hosts

# Page-locked copies over 16 lanes, of 31.5 and 63.0 GB/s per direction on the wire (16 and 32 GT/s, 128b/130b).
GEN4 = 25e9
GEN5 = 55e9


@dataclass(frozen=True)
class Machine:
    """One device, its link to the host, and the host memory in which its optimizer works."""

    name: str
    flops_per_s: float  # sustained
    up_bytes_per_s: float  # host to device, alone
    down_bytes_per_s: float  # device to host, alone
    duplex: float  # the share of that in each direction while both run: 1 is full duplex, 0.5 a shared wire
    dram_bytes_per_s: float  # for the optimizer
    device_nbytes: int
    host_nbytes: int
    # Read and written by a step of AdamW: FP32 weight, two FP32 moments (24), a bf16 gradient in, a bf16 weight out.
    optimizer_bytes_per_parameter: float = 28
    fp32_flops_per_s: float | None = None  # sustained, of FP32 that stays FP32; None: the same as in half precision


def _profile(
    name: str,
    peak_flops: float,
    peak_fp32: float,
    link: float,
    peak_dram: float,
    device_nbytes: float,
    host_nbytes: int,
) -> Machine:
    return Machine(
        name=name,
        flops_per_s=peak_flops * SUSTAINED_FLOPS,
        up_bytes_per_s=link,
        down_bytes_per_s=link,
        duplex=DUPLEX,
        dram_bytes_per_s=peak_dram * SUSTAINED_DRAM,
        device_nbytes=int(device_nbytes),
        host_nbytes=host_nbytes,
        fp32_flops_per_s=peak_fp32 * SUSTAINED_FLOPS,
    )


# Peaks are the vendors': dense bf16 tensor operations with FP32 accumulation, without sparsity; then FP32 outside of
# tensor cores, as torch multiplies it by default. Hosts are typical ones, with one active device on a socket of its
# own: divide what several devices share.
MACHINES = {
    machine.name: machine
    for machine in (
        # NVIDIA Ampere GA102 GPU architecture whitepaper: 128 FLOP per tensor core and clock. 112 tensor cores, 3584
        # CUDA cores, 1.777 GHz, 12 GB. Two channels of DDR4-3200: 51.2 GB/s.
        _profile("rtx3060", 25.5e12, 12.7e12, GEN4, 51.2e9, 12 * GIB, 64 * GIB),
        # NVIDIA Ada GPU architecture whitepaper: 165.2 TFLOP/s, 24 GB. Two channels of DDR5-5600: 89.6 GB/s.
        _profile("rtx4090", 165.2e12, 82.6e12, GEN4, 89.6e9, 24 * GIB, 128 * GIB),
        # NVIDIA RTX Blackwell GPU architecture whitepaper: 209.5 TFLOP/s, 32 GB. Two channels of DDR5-6400: 102.4 GB/s.
        _profile("rtx5090", 209.5e12, 104.8e12, GEN5, 102.4e9, 32 * GIB, 192 * GIB),
        # NVIDIA A100 80GB SXM datasheet: 312 TFLOP/s. EPYC 7003, eight channels of DDR4-3200: 204.8 GB/s.
        _profile("a100", 312e12, 19.5e12, GEN4, 204.8e9, 80 * GIB, 1024 * GIB),
        # NVIDIA H100 SXM datasheet: 989.4 TFLOP/s, 80 GB. Xeon 8480C, eight channels of DDR5-4800: 307.2 GB/s.
        _profile("h100", 989.4e12, 66.9e12, GEN5, 307.2e9, 80 * GIB, 2048 * GIB),
        # NVIDIA H200 SXM datasheet: 989.4 TFLOP/s, 141 GB. Xeon 8580, eight channels of DDR5-5600: 358.4 GB/s.
        _profile("h200", 989.4e12, 66.9e12, GEN5, 358.4e9, 141e9, 2048 * GIB),
        # AMD Instinct MI300X data sheet: 1307.4 TFLOP/s, 192 GB. EPYC 9004, twelve channels of DDR5-4800: 460.8 GB/s.
        _profile("mi300x", 1307.4e12, 163.4e12, GEN5, 460.8e9, 192e9, 2048 * GIB),
    )
}
