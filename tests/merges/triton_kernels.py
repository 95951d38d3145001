"""Elementary functions as Triton kernels; imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def exp(x, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.exp(tl.load(x + at, mask=at < size)), mask=at < size)


@triton.jit
def exp2(x, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.exp2(tl.load(x + at, mask=at < size)), mask=at < size)


@triton.jit
def log(x, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.log(tl.load(x + at, mask=at < size)), mask=at < size)


@triton.jit
def log2(x, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.log2(tl.load(x + at, mask=at < size)), mask=at < size)


@triton.jit
def divide(x, y, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < size)
    tl.store(result + at, a / tl.load(y + at, mask=at < size), mask=at < size)
