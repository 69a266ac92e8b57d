"""CUDA's optimizer arithmetic on the simulated device, against a reference of its own in NumPy, bit for bit.

The reference knows one fused multiply-add, made of float64 (`fma`), and float32's other operators, which are rounded
correctly. Special values are among the elements: zeros, denormals, infinities, NaN, and the largest and smallest.
"""

import random

import numpy as np
import pytest
import torch

import simgpu

D = "simgpu"
F32 = np.float32
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan]
CHUNK, THREADS, PLACES = 65536, 512, 4

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def as_on_cuda():
    with simgpu.cuda_arithmetic(), np.errstate(all="ignore"):
        yield
        torch.accelerator.synchronize()


def fma(a, b, c):
    """a * b + c of float32, rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    product, c = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    up = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    even = total.view(np.int64) & 1 == 0
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & even
    return np.where(inexact, up, total).astype(F32)


def numbers(n, seed, scale=1.0):
    """Elements of many sizes, with all special values among them."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-20, 20, n)) * scale).astype(F32)
    x[rng.permutation(n)[: 4 * len(SPECIAL)]] = np.array(SPECIAL * 4, F32)
    return x


def gradients(n, seed):
    return (np.random.default_rng(seed).standard_normal(n) * 1e-2).astype(F32)


def there(x):
    return torch.from_numpy(np.ascontiguousarray(x)).to(D)


def assert_same_bits(actual, expected):
    actual = actual.cpu().numpy() if isinstance(actual, torch.Tensor) else actual
    expected = np.asarray(expected, actual.dtype)
    same = (actual.view(np.int32) == expected.view(np.int32)) | (np.isnan(actual) & np.isnan(expected))
    assert same.all(), (actual[~same][:4], expected[~same][:4], (~same).sum())


# ---- operators


def lerp(a, b, _, weight):
    weight = F32(weight)
    return fma(weight, b - a, a) if abs(weight) < 0.5 else fma(-(b - a), F32(1) - weight, b)


def addcmul(a, b, c, value):
    return fma(b, c, a) if value == 1 else fma(F32(value), b * c, a)


def addcdiv(a, b, c, value):
    return a + b / c if value == 1 else fma(F32(value), b / c, a)


# ---- norms


def tree(x):
    """The sum of a warp, or of the warps of a block."""
    n = x.shape[-1] // 2
    while n:
        x = x[..., :n] + x[..., n : 2 * n]
        n //= 2
    return x[..., 0]


def block(threads):
    warps = np.zeros(32, F32)
    warps[:16] = tree(threads.reshape(16, 32))
    return tree(warps)


def norm(x, aligned):
    total = np.zeros(THREADS, F32)
    for number, begin in enumerate(range(0, len(x), CHUNK)):
        part = x[begin : begin + CHUNK]
        rounds = -(-len(part) // (THREADS * PLACES))
        filled, there = (np.zeros(rounds * THREADS * PLACES, kind) for kind in (F32, bool))
        filled[: len(part)], there[: len(part)] = part, True
        places = np.zeros((THREADS, PLACES), F32)
        for turn, used in zip(filled.reshape(rounds, -1), there.reshape(rounds, -1), strict=True):
            shape = (THREADS, PLACES) if aligned else (PLACES, THREADS)
            turn, used = (one.reshape(shape) if aligned else one.reshape(shape).T for one in (turn, used))
            places = np.where(used, fma(turn, turn, places), places)
        sums = np.zeros(THREADS, F32)
        for place in range(PLACES):
            sums = sums + places[:, place]
        total[number % THREADS] += block(sums)
    return np.sqrt(block(total))


@pytest.mark.parametrize("n", [1, 5, 4096, 4098, 65536, 65540, 65537, 300_000, 300_001])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_norm_has_the_references_bits(n, offset):
    data = gradients(n + offset, n)
    x = there(data)[offset:]
    aligned = n % 4 == 0 and offset % 4 == 0
    (found,) = torch._foreach_norm([x])
    assert found.shape == () and found.device.type == D
    assert_same_bits(found.cpu().numpy().reshape(1), norm(data[offset:], aligned).reshape(1))


# ---- fused steps


def bits(number):
    return np.array(number, np.uint32).view(F32)[()]


def power(base, exponent):
    """CUDA's powf for a base between 0 and 1, as its machine code has it: a logarithm of two numbers, and exp2."""
    base, exponent, log2e = F32(base), F32(exponent), bits(0x3FB8AA3B)
    number = int(base.view(np.int32))
    scale = (number - 0x3F3504F3) // 2**23 * 2**23
    near = bits(number - scale)
    x, inverse = near - F32(1), F32(1) / (near + F32(1))
    u = inverse * (x + x)
    t, difference = u * u, x - u
    rest = inverse * fma(-u, x, difference + difference)
    whole = F32(scale) * F32(2**-23)
    first = fma(u, log2e, whole)
    low = fma(bits(0x32A55E34), u, fma(rest, log2e, fma(u, log2e, whole - first)))
    series = bits(0x3A2C32E4)
    for factor in (0.0032181653659790754318, 0.018033718690276145935, 0.12022458761930465698):
        series = fma(series, t, F32(factor))
    series = series * t
    low = fma(series, u, fma(series * F32(3), rest, low))
    high = first + low
    low = low - (high - first)
    product = exponent * high
    turns = np.rint(product)
    part = fma(exponent, low, fma(exponent, high, -product)) + (product - turns)
    result = bits(0x391FCB8E)
    for factor in (0.0013391353422775864601, 0.0096188392490148544312, 0.055503588169813156128, 0.24022644758224487305):
        result = fma(result, part, F32(factor))
    result = fma(fma(result, part, F32(0.69314718246459960938)), part, F32(1))
    return F32(np.ldexp(np.float64(result), int(turns)))


def adam_step(p, g, m, v, largest, step, *, lr, beta1, beta2, decay, eps, decoupled, maximize, scale=None):
    lr, b1, b2, decay, eps = (F32(x) for x in (lr, beta1, beta2, decay, eps))
    if scale is not None:
        g = g / F32(scale)
    stored, g = g, -g if maximize else g
    if decay and decoupled:
        p = fma(-(lr * decay), p, p)
    elif decay:
        g = fma(p, decay, g)
    square = g * g
    m = fma(b1, m, fma(-b1, g, g))
    v = fma(b2, v, fma(-b2, square, square))
    largest = None if largest is None else np.where(largest < v, v, largest)
    correction1, correction2 = (F32(1) - power(b, step) for b in (b1, b2))
    denominator = np.sqrt(v if largest is None else largest) / np.sqrt(correction2) + eps
    return p - m * (lr / correction1) / denominator, stored, m, v, largest


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_fused_adam_step_has_the_references_bits(seed):
    rnd = random.Random(seed)
    options = {"lr": rnd.choice([1e-3, 0.1]), "beta1": rnd.choice([0.9, 0.5]), "beta2": rnd.choice([0.999, 0.95])}
    options |= {"decay": rnd.choice([0, 0.01]), "eps": rnd.choice([1e-8, 1e-5]), "maximize": rnd.random() < 0.3}
    decoupled, amsgrad = rnd.random() < 0.5, rnd.random() < 0.3
    scale, step = rnd.choice([None, None, 1024.0, 3.0]), rnd.choice([1, 2, 17, 102, 1000])
    n = rnd.choice([64, 1001, 20_000])
    p, g, m, v, largest = (numbers(max(n, 64), seed + 100 * k) for k in range(5))
    v, largest = np.abs(v), np.abs(largest)
    expected = adam_step(p, g, m, v, largest if amsgrad else None, step, decoupled=decoupled, scale=scale, **options)
    lists = [[there(x)] for x in (p, g, m, v)] + [[there(largest)] if amsgrad else []]
    function = torch._fused_adamw_ if decoupled else torch._fused_adam_
    named = {"weight_decay": options.pop("decay")} | options
    function(
        *lists,
        [torch.tensor(float(step), device=D)],
        amsgrad=amsgrad,
        grad_scale=None if scale is None else torch.tensor(scale, device=D),
        found_inf=None,
        **named,
    )
    for list_, right in zip(lists, expected, strict=True):
        if list_:
            assert_same_bits(list_[0], right)


# ---- a plain run


def adamw_run(data, steps, kind, lr=0.01, beta1=0.9, beta2=0.999, decay=0.1, eps=1e-8):
    """AdamW by torch's loop or on lists, as their Python says; the quotient by a number is a product in the loop."""
    p, m, v = data.copy(), np.zeros_like(data), np.zeros_like(data)
    for step in range(1, steps + 1):
        g = gradients(len(data), step)
        if kind == "fused":
            options = {"lr": lr, "beta1": beta1, "beta2": beta2, "decay": decay, "eps": eps}
            p, _, m, v, _ = adam_step(p, g, m, v, None, step, decoupled=True, maximize=False, **options)
            continue
        p = p * F32(1 - lr * decay)
        m = lerp(m, g, None, 1 - beta1)
        v = addcmul(v * F32(beta2), g, g, 1 - beta2)
        correction = F32((1 - beta2**step) ** 0.5)
        root = np.sqrt(v) * (F32(1) / correction) if kind == "loop" else np.sqrt(v) / correction
        p = addcdiv(p, m, root + F32(eps), -(lr / (1 - beta1**step)))
    return p, m, v


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused", "default"])
def test_an_adamw_run_has_the_references_bits(kind):
    data = np.random.default_rng(0).standard_normal(10_001).astype(F32)
    parameter = torch.nn.Parameter(there(data))
    options = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}[kind]
    optimizer = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, **options)
    for step in range(1, 6):
        parameter.grad = there(gradients(len(data), step))
        optimizer.step()
    p, m, v = adamw_run(data, 5, "foreach" if kind == "default" else kind)
    state = optimizer.state[parameter]
    assert_same_bits(state["exp_avg"], m)
    assert_same_bits(state["exp_avg_sq"], v)
    assert_same_bits(parameter.detach(), p)
