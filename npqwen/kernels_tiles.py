"""x w^T on matrix tiles (AMX), in float32 although the tiles multiply bf16: nothing is rounded on the way in.

A bf16 weight is what a tile takes. A float32 activation has 24 bits, so it is the sum of three bf16 numbers of 8 bits:
its leading bits, the leading bits of what is left, and the rest. The tiles multiply each part with the weights exactly and
add all products up in float32, as any float32 product does. Three bf16 products still take a third of the time of one
float32 product on vectors.

    x (T, E) float32  --pack-->  parts[group of 16 tokens][step of 32 columns][part] = 16 pairs (k, k + 1) x 16 tokens
    sums[rows of w][tokens] += w[16 rows, 32 columns] parts[32 columns, 16 tokens]    of the matrix where it lies

Only parts below 1.2e-38 count as 0, so that activations below 1e-33 lose their last bits, and an infinite weight may give
NaN where its sum is infinite.
Source: Henry, Tang, Heinecke, arXiv 1904.06376, section 2 (products of numbers split into bf16 parts).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types

from npqwen.jit import jit
from npqwen.kernels_simd import (
    _F32,
    _I16,
    _I32,
    _I64,
    WIDE,
    _call,
    _choose,
    _data,
    _loop,
    _prefetch,
    _zip,
    intrinsic,
    take,
)
from npqwen.scratch import scratch

ROWS = 16  # of a tile
STEP = 32  # columns of the weights in a tile
PARTS = 3  # bf16 numbers that make a float32
PART = ROWS * STEP  # numbers in a tile of 16 bits
SUMS = ROWS * ROWS  # numbers in a tile of float32
BLOCK_T = 8  # groups of 16 tokens, whose parts stay in the second cache
BLOCK_N = 16  # groups of 16 weight rows that meet them there
BLOCK_K = 32  # steps of a row at a time, so that both do stay
ITEMS = 16  # wanted at least, so that threads end together

_I8 = ir.IntType(8)
_FLOATS, _WORDS = ir.VectorType(_F32, ROWS), ir.VectorType(_I32, ROWS)
_ROW_BYTES = 64
# Palette 1, then bytes per row of eight tiles from byte 16 on, their rows from byte 48 on: all as large as can be.
_LAYOUT = bytes([1]) + bytes(15) + bytes([_ROW_BYTES, 0] * 8) + bytes(16) + bytes([ROWS] * 8) + bytes(8)
_WEIGHTS, _TOKENS = (4, 5), (6, 7)  # tiles; 0 to 3 hold the sums


@cache
def available() -> bool:
    """Whether this machine has tiles and the system lets the process use them, which it has to be asked for."""
    features = binding.get_host_cpu_features()
    config: object = numba.config
    chosen = getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None)
    if chosen or not WIDE or sys.platform != "linux" or not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def fit(w_NE: np.ndarray) -> bool:
    """Whether a matrix can be multiplied in tiles: bf16 bits, in whole steps, at least a tile of rows (or none)."""
    return w_NE.dtype == np.uint16 and (len(w_NE) == 0 or (len(w_NE) >= ROWS and w_NE.shape[1] % STEP == 0))


def products(x_TE, w0, out0, w1, out1, w2, out2, counters, workers):
    """out = x w^T for three matrices that fit. The caller holds threads.lock; counters are four zeros."""
    T, E = x_TE.shape
    groups, steps = -(-T // ROWS), E // STEP
    parts = scratch("parts", groups * steps * PARTS * PART // 2).view(np.uint16)
    sums = scratch("sums", workers * BLOCK_T * BLOCK_N * SUMS).reshape(workers, -1)
    if workers == 1:
        _pack(x_TE, parts, counters[3:])
        _products(parts, w0, out0, w1, out1, w2, out2, sums[0], counters)
    else:
        _pack_parallel(x_TE, parts, counters[3:], workers)
        _products_parallel(parts, w0, out0, w1, out1, w2, out2, sums, counters, workers)


@jit()
def _pack(x, parts, counter):
    """The parts of all tokens, 16 at a time; of tokens that do not exist, the first of the group's."""
    T, E = x.shape
    steps = E // STEP
    while True:
        group = take(counter)
        if group * ROWS >= T:
            return
        for k in range(steps):
            split_tile(x, group * ROWS * E + k * STEP, E, T - group * ROWS, parts, (group * steps + k) * PARTS * PART)


@jit(parallel=True)
def _pack_parallel(x, parts, counter, workers):
    for _ in numba.prange(workers):
        _pack(x, parts, counter)


@jit()
def _products(parts, w0, out0, w1, out1, w2, out2, sums, counters):
    open_tiles()
    _products_one(parts, w0, out0, sums, counters[0:])
    _products_one(parts, w1, out1, sums, counters[1:])
    _products_one(parts, w2, out2, sums, counters[2:])
    close_tiles()


@jit(parallel=True)
def _products_parallel(parts, w0, out0, w1, out1, w2, out2, sums, counters, workers):
    for i in numba.prange(workers):
        _products(parts, w0, out0, w1, out1, w2, out2, sums[i], counters)


@jit()
def _products_one(parts, w, out, sums, counter):
    """An item is a block of tokens and a block of weight rows, walked in pairs of groups: two by two tiles of sums."""
    T, (N, E) = len(out), w.shape
    t_groups, n_groups, steps = (T + ROWS - 1) // ROWS, (N + ROWS - 1) // ROWS, E // STEP
    t_blocks = (t_groups + BLOCK_T - 1) // BLOCK_T
    block_n = max(1, min(BLOCK_N // 2, n_groups * t_blocks // (2 * ITEMS))) * 2
    n_blocks = (n_groups + block_n - 1) // block_n
    k_blocks = (steps + BLOCK_K - 1) // BLOCK_K if t_groups > 2 else 1  # few tokens: all their parts are near anyway
    group_parts = steps * PARTS * PART
    while True:
        item = take(counter)
        if item >= t_blocks * n_blocks:
            return
        t_from, n_from = item // n_blocks * BLOCK_T, item % n_blocks * block_n
        t_to, n_to = min(t_from + BLOCK_T, t_groups), min(n_from + block_n, n_groups)
        for k_block in range(k_blocks):
            k0, k1 = k_block * steps // k_blocks, (k_block + 1) * steps // k_blocks
            at = 0
            for n in range(n_from, n_to, 2):
                # The last tile ends with the matrix: rows that two tiles hold are computed twice, to the same bits.
                row0, row1 = min(n * ROWS, N - ROWS), min((n + 1) * ROWS, N - ROWS)
                # The hardware does not foresee walks along 32 rows at once, so each pair asks for the rows of the next.
                ahead = min(2 * ROWS, N - ROWS - row1) * E if n + 2 < n_to else 0
                for t in range(t_from, t_to, 2):
                    wide = min(2, t_to - t)
                    tile_products(
                        w, row0 * E + k0 * STEP, row1 * E + k0 * STEP, E, ahead,
                        parts, t * group_parts + k0 * PARTS * PART, group_parts,
                        k1 - k0, sums, at, k_block == 0, wide,
                    )  # fmt: skip
                    if k_block == k_blocks - 1:
                        for i in range(wide):
                            t0 = (t + i) * ROWS
                            turn_tile(sums, at + i * SUMS, out, t0 * N + row0, N, T - t0)
                            turn_tile(sums, at + (2 + i) * SUMS, out, t0 * N + row1, N, T - t0)
                    at += 4 * SUMS


def _bytes(context, builder, signature, arguments, index, offset, itemsize):
    data = _data(context, builder, signature.args[index], arguments[index])
    return builder.gep(builder.bitcast(data, _I8.as_pointer()), [builder.mul(offset, _I64(itemsize))])


def _tile(builder, name, *arguments):
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), list(arguments))


@intrinsic
def open_tiles(_context):
    """Lays the thread's tile registers out; before any tile_products."""

    def codegen(context, builder, _signature, _arguments):
        _tile(builder, "ldtilecfg", context.insert_const_bytes(builder.module, _LAYOUT))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def close_tiles(_context):
    """Gives them back: a thread that holds tiles is slow to switch."""

    def codegen(context, builder, _signature, _arguments):
        _tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tile_products(_context, w, w0, w1, ldw, ahead, parts, p0, ldp, steps, sums, s0, first, wide):
    """Four tiles of sums[row of w][token], from s0 on, in the order (w0, p0), (w0, p0 + ldp), (w1, p0), (w1, p0 + ldp).

    Each is added to, or if `first` begun, over so many steps from the 16 rows of w at w0 or w1 and a group's parts at p0
    or p0 + ldp; if wide is 1, only those at p0. The rows `ahead` numbers later are asked for meanwhile.
    """

    def codegen(context, builder, signature, arguments):
        _, w0, w1, ldw, ahead, _, p0, ldp, steps, _, s0, first, wide = arguments
        size = _I64(_ROW_BYTES)
        row = builder.mul(ldw, _I64(2))
        w_at = [_bytes(context, builder, signature, arguments, 0, at, 2) for at in (w0, w1)]
        p_at = [_bytes(context, builder, signature, arguments, 5, at, 2) for at in (p0, builder.add(p0, ldp))]
        s_at = [_bytes(context, builder, signature, arguments, 9, builder.add(s0, _I64(i * SUMS)), 4) for i in range(4)]

        def emit(columns):
            tiles = [2 * n + t for n in range(2) for t in range(columns)]
            with builder.if_else(first) as (begin, go_on):
                with begin:
                    for i in tiles:
                        _tile(builder, "tilezero", _I8(i))
                with go_on:
                    for i in tiles:
                        _tile(builder, "tileloadd64", _I8(i), s_at[i], size)

            def step(k, nothing):
                k_w, k_p = builder.mul(k, _I64(2 * STEP)), builder.mul(k, _I64(2 * PARTS * PART))
                for n in range(2):
                    at = builder.gep(w_at[n], [k_w])
                    _tile(builder, "tileloadd64", _I8(_WEIGHTS[n]), at, row)
                    later = builder.gep(at, [builder.mul(ahead, _I64(2))])
                    for i in range(ROWS):
                        _prefetch(builder, builder.gep(later, [builder.mul(row, _I64(i))]), 2)
                for i in range(PARTS * columns):
                    part, t = divmod(i, columns)
                    held = _I8(_TOKENS[i % 2])  # by turns: one is filled while the other multiplies
                    place = builder.gep(p_at[t], [builder.add(k_p, _I64(2 * PART * part))])
                    _tile(builder, "tileloadd64", held, place, size)
                    for n in range(2):
                        _tile(builder, "tdpbf16ps", _I8(2 * n + t), _I8(_WEIGHTS[n]), held)
                return nothing

            _loop(builder, steps, 1, [], step)
            for i in tiles:
                _tile(builder, "tilestored64", _I8(i), s_at[i], size)

        _choose(builder, wide, {1: lambda: emit(1), 2: lambda: emit(2)})
        return context.get_dummy_value()

    size = types.intp
    return types.void(w, size, size, size, size, parts, size, size, size, sums, size, types.boolean, size), codegen


@intrinsic
def split_tile(_context, x, x0, ldx, rows, parts, p0):
    """parts[p0 + p PART + 32 j + 2 t + i] = part p of x[x0 + t ldx + 2 j + i], as bf16 bits; reads only t < rows."""

    def codegen(context, builder, signature, arguments):
        _, x0, ldx, rows, _, p0 = arguments
        pairs = ir.VectorType(_I16, 2 * ROWS)
        high_halves = ir.Constant(
            ir.VectorType(_I32, 2 * ROWS), [ir.Constant(_I32, 2 * i + 1) for i in range(2 * ROWS)]
        )
        leading = ir.Constant(_WORDS, [ir.Constant(_I32, -0x10000)] * ROWS)
        size = ir.Constant(_WORDS, [ir.Constant(_I32, 0x7FFFFFFF)] * ROWS)
        infinite = ir.Constant(_WORDS, [ir.Constant(_I32, 0x7F800000)] * ROWS)
        nothing = ir.Constant(_FLOATS, None)
        words: list[list] = [[] for _ in range(PARTS)]
        for t in range(ROWS):
            token = builder.select(builder.icmp_signed("<", _I64(t), rows), _I64(t), _I64(0))
            place = _bytes(context, builder, signature, arguments, 0, builder.add(x0, builder.mul(token, ldx)), 4)
            place = builder.bitcast(place, _FLOATS.as_pointer())
            left = [builder.load(builder.gep(place, [_I32(i)])) for i in range(2)]
            for value in left:
                value.align = 4
            for p in range(PARTS):
                bits = [builder.bitcast(value, _WORDS) for value in left]
                pair = builder.shuffle_vector(*[builder.bitcast(b, pairs) for b in bits], high_halves)
                words[p].append(builder.bitcast(pair, _WORDS))
                if p < PARTS - 1:
                    heads = [builder.bitcast(builder.and_(b, leading), _FLOATS) for b in bits]
                    rest = [builder.fsub(value, head) for value, head in zip(left, heads, strict=True)]
                    endless = [
                        builder.icmp_signed("==", builder.and_(b, size), infinite) for b in bits
                    ]  # inf - inf: NaN
                    left = [builder.select(e, nothing, r) for e, r in zip(endless, rest, strict=True)]
        for p in range(PARTS):
            for j, pair in enumerate(_zip(builder, words[p])):
                at = builder.add(p0, _I64(p * PART + j * STEP))
                place = _bytes(context, builder, signature, arguments, 4, at, 2)
                builder.store(pair, builder.bitcast(place, _WORDS.as_pointer())).align = 4
        return context.get_dummy_value()

    size = types.intp
    return types.void(x, size, size, size, parts, size), codegen


@intrinsic
def turn_tile(_context, sums, s0, out, out0, ldo, rows):
    """out[out0 + t ldo + n] = sums[s0 + 16 n + t] for n < 16 and t < rows."""

    def codegen(context, builder, signature, arguments):
        _, s0, _, out0, ldo, rows = arguments
        place = _bytes(context, builder, signature, arguments, 0, s0, 4)
        place = builder.bitcast(place, _FLOATS.as_pointer())
        vectors = [builder.load(builder.gep(place, [_I32(n)])) for n in range(ROWS)]
        for vector in vectors:
            vector.align = 4
        for t, vector in enumerate(_zip(builder, vectors)):
            with builder.if_then(builder.icmp_signed("<", _I64(t), rows)):
                at = builder.add(out0, builder.mul(_I64(t), ldo))
                place = _bytes(context, builder, signature, arguments, 2, at, 4)
                builder.store(vector, builder.bitcast(place, _FLOATS.as_pointer())).align = 4
        return context.get_dummy_value()

    size = types.intp
    return types.void(sums, size, out, size, size, size), codegen
