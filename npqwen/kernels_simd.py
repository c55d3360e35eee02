"""Vector code that LLVM does not find by itself: three loops with their accumulators pinned to registers.

Left alone, LLVM halves the vector width on AVX-512 machines and finds no room for 4 x 6 sums written as Python scalars;
spelled as vectors, the same loop runs twice as fast. Everything else in the kernels is plain index loops.
All offsets and strides count elements. uint16 means bf16 bits, int16 float16 bits; sums are float32.
"""

from typing import Any

from llvmlite import binding, ir
from numba import extending, types
from numba.core import cgutils

# The widest vector the machine has, and as many sums as fit its 32 registers (16 without AVX-512) beside the operands.
WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
LANES = 16 if WIDE else 8
TILE_K = 2 * LANES
DOT_ROWS, DOT_COLS = (4, 6) if WIDE else (2, 4)
WIDE_COLS = DOT_COLS // 2
SUM_ROWS, SUM_VECTORS = (6, 4) if WIDE else (3, 4)
AHEAD = 1024  # bytes of each row that are asked for before they are needed

LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 0.693359375, -0.00021219444005471377
EXP_P = (0.0013814539415761828, 0.00836874544620514, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552)

intrinsic: Any = extending.intrinsic  # typed as if it were called with the typing context, too

_I1, _I16, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_MASK = ir.VectorType(_I1, LANES)


def _call(builder, name, result, arguments, **kwargs):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **kwargs)


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _mask(builder, count, lanes=LANES):
    """Lanes 0 .. count-1."""
    index = ir.Constant(ir.VectorType(_I32, lanes), [ir.Constant(_I32, i) for i in range(lanes)])
    limit = builder.insert_element(ir.Constant(index.type, None), builder.trunc(count, _I32), _I32(0))
    zeros = ir.Constant(index.type, None)
    return builder.icmp_signed("<", index, builder.shuffle_vector(limit, limit, zeros))


@intrinsic
def take(_context, counter):
    """The counter's value before this call, which adds one to it: no two threads get the same."""

    def codegen(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        return builder.atomic_rmw("add", data, _I64(1), "monotonic")

    return types.int64(counter), codegen


def _prefetch(builder, place, near):
    """near: 3 for the innermost cache, 2 for the next. The address may be of no memory at all."""
    place = builder.bitcast(place, ir.IntType(8).as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, _I32(0), _I32(near), _I32(1)])


@intrinsic
def prefetch(_context, x, x0):
    """Asks for the cache line of x at this element, which may lie past the array's end."""

    def codegen(context, builder, signature, arguments):
        data = builder.bitcast(_data(context, builder, signature.args[0], arguments[0]), _F32.as_pointer())
        _prefetch(builder, builder.gep(data, [arguments[1]]), 2)
        return context.get_dummy_value()

    return types.void(x, types.intp), codegen


def _load_raw(builder, item, lanes, data, offset, mask=None):
    """Values from `offset` on, wherever they start; masked lanes are 0 and are not touched in memory."""
    vector = ir.VectorType(item, lanes)
    place = builder.gep(builder.bitcast(data, item.as_pointer()), [offset])
    place = builder.bitcast(place, vector.as_pointer())
    if mask is None:
        raw = builder.load(place)
        raw.align = 1  # weights of a file may start anywhere
        return raw
    name = f"llvm.masked.load.v{lanes}{'f32' if item is _F32 else 'i16'}.p0"
    return _call(builder, name, vector, [place, _I32(1), mask, ir.Constant(vector, None)])


def _load(builder, dtype, data, offset, mask=None):
    """LANES values as float32."""
    if dtype == types.float32:
        return _load_raw(builder, _F32, LANES, data, offset, mask)
    raw = _load_raw(builder, _I16, LANES, data, offset, mask)
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    shift = ir.Constant(ir.VectorType(_I32, LANES), [ir.Constant(_I32, 16)] * LANES)
    return builder.bitcast(builder.shl(builder.zext(raw, shift.type), shift), _VECTOR)


def _store(builder, value, data, offset, mask=None):
    place = builder.bitcast(builder.gep(builder.bitcast(data, _F32.as_pointer()), [offset]), _VECTOR.as_pointer())
    if mask is None:
        builder.store(value, place).align = 4
    else:
        _call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), [value, place, _I32(4), mask])


def _splat(builder, value):
    first = builder.insert_element(ir.Constant(_VECTOR, None), value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, LANES), None))


def _multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _add_lanes(builder, vector):
    return _call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", _F32, [_F32(0.0), vector], fastmath=("reassoc",))


def _loop(builder, stop, step, sums, body):
    """sums after `for k in range(0, stop, step): sums = body(k, sums)`, the sums in registers."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(_I64)
    k.add_incoming(_I64(0), before)
    phis = [builder.phi(s.type) for s in sums]
    for phi, s in zip(phis, sums, strict=True):
        phi.add_incoming(s, before)
    builder.cbranch(builder.icmp_signed("<", k, stop), inside, after)
    builder.position_at_end(inside)
    new = body(k, phis)
    k.add_incoming(builder.add(k, _I64(step)), builder.block)
    for phi, s in zip(phis, new, strict=True):
        phi.add_incoming(s, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return phis


def _every_vector(builder, n, sums, step):
    """sums after step(k, sums) on all whole vectors below n, then on what is left, masked."""
    whole = builder.and_(n, _I64(-LANES))
    rest = builder.sub(n, whole)
    sums = _loop(builder, whole, LANES, sums, step)
    mask = _mask(builder, rest)
    return _loop(builder, rest, LANES, sums, lambda k, s: step(builder.add(whole, k), s, mask))  # one round or none


def _choose(builder, value, cases):
    """Runs cases[value], of a dict of functions; other values run nothing."""
    after = builder.append_basic_block("after")
    switch = builder.switch(value, after)
    for key, emit in cases.items():
        block = builder.append_basic_block("case")
        switch.add_case(_I64(key), block)
        builder.position_at_end(block)
        emit()
        builder.branch(after)
    builder.position_at_end(after)


def _emit_dots(context, builder, signature, arguments, rows, cols):
    _, a0, lda, _, b0, ldb, n, _, c0, ldi, ldj, _ = arguments
    a, b, c = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 3, 7))
    ahead = AHEAD * 8 // signature.args[0].dtype.bitwidth
    a_at = [builder.add(a0, builder.mul(_I64(i), lda)) for i in range(rows)]
    b_at = [builder.add(b0, builder.mul(_I64(j), ldb)) for j in range(cols)]

    def step(k, sums, mask=None):
        b_j = [_load(builder, signature.args[3].dtype, b, builder.add(at, k), mask) for at in b_at]
        new = []
        for i, at in enumerate(a_at):
            if mask is None:  # the hardware looks ahead in each row, but not past the end of a page
                _prefetch(builder, builder.gep(a, [builder.add(builder.add(at, k), _I64(ahead))]), 3)
            a_i = _load(builder, signature.args[0].dtype, a, builder.add(at, k), mask)
            new += [_multiply_add(builder, a_i, b_j[j], sums[i * cols + j]) for j in range(cols)]
        return new

    sums = _every_vector(builder, n, [ir.Constant(_VECTOR, None)] * (rows * cols), step)
    c = builder.bitcast(c, _F32.as_pointer())
    for j in range(cols):
        at = builder.add(c0, builder.mul(_I64(j), ldj))
        for i in range(rows):
            place = builder.gep(c, [builder.add(at, builder.mul(_I64(i), ldi))])
            builder.store(_add_lanes(builder, sums[i * cols + j]), place)


def _make_dots(rows, most_cols):
    @intrinsic
    def dots(_context, a, a0, lda, b, b0, ldb, n, c, c0, ldi, ldj, cols):
        def codegen(context, builder, signature, arguments):
            cases = {
                j: lambda j=j: _emit_dots(context, builder, signature, arguments, rows, j)
                for j in range(1, most_cols + 1)
            }
            _choose(builder, arguments[-1], cases)
            return context.get_dummy_value()

        size = types.intp
        return types.void(a, size, size, b, size, size, size, c, size, size, size, size), codegen

    return dots


# c[c0 + i ldi + j ldj] = sum_k a[a0 + i lda + k] b[b0 + j ldb + k] for k < n and
dot_tile = _make_dots(DOT_ROWS, DOT_COLS)  # i < DOT_ROWS, j < cols <= DOT_COLS
dot_wide = _make_dots(2 * DOT_ROWS, WIDE_COLS)  # i < 2 DOT_ROWS, j < cols <= WIDE_COLS
dot_row = _make_dots(1, DOT_COLS)  # i < 1, j < cols <= DOT_COLS


def _emit_sums(context, builder, signature, arguments, rows, vectors):
    _, p0, ldp, _, v0, ldv, n, _, out0, ldo, _, keep0, first, width, _ = arguments
    p, v, out, keep = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 3, 7, 10))
    mask = _mask(builder, width) if vectors == 1 else None
    p, keep = (builder.bitcast(x, _F32.as_pointer()) for x in (p, keep))
    p_at = [builder.add(p0, builder.mul(_I64(r), ldp)) for r in range(rows)]
    row_at = [builder.add(out0, builder.mul(_I64(r), ldo)) for r in range(rows)]
    out_at = [builder.add(at, _I64(LANES * u)) for at in row_at for u in range(vectors)]
    factors = [_splat(builder, builder.load(builder.gep(keep, [builder.add(keep0, _I64(r))]))) for r in range(rows)]
    old = [_load(builder, types.float32, out, at, mask) for at in out_at]
    old = [builder.fmul(factors[i // vectors], x) for i, x in enumerate(old)]
    sums = [builder.select(first, ir.Constant(_VECTOR, None), x) for x in old]

    def step(s, sums):
        at = builder.add(v0, builder.mul(s, ldv))
        v_u = [_load(builder, types.float32, v, builder.add(at, _I64(LANES * u)), mask) for u in range(vectors)]
        p_r = [_splat(builder, builder.load(builder.gep(p, [builder.add(at, s)]))) for at in p_at]
        return [_multiply_add(builder, p_r[i // vectors], v_u[i % vectors], x) for i, x in enumerate(sums)]

    for at, total in zip(out_at, _loop(builder, n, 1, sums, step), strict=True):
        _store(builder, total, out, at, mask)


def _exp(builder, x):
    """e^x within 1 ulp for -87 < x < 88, cut off above, 0 below, NaN for NaN. Plain arithmetic, so in vectors.

    Only in kernels compiled as exact: the split of ln 2 and the large sum below are what reordering would undo.
    x = n ln 2 + r: adding 1.5 * 2^23 rounds x / ln 2 to the integer n and leaves it in the low bits of the sum; ln 2 is
    taken off in two parts, the first short enough that n times it is exact. e^r = 1 + r + r^2 p(r), p fitted to the
    least relative error for |r| <= ln 2 / 2 (3e-9). 2^n is put together from its bits, and n = -127 gives 0.
    """

    def same(value):
        return ir.Constant(_VECTOR, [ir.Constant(_F32, value)] * LANES)

    def whole(value):
        return ir.Constant(ir.VectorType(_I32, LANES), [ir.Constant(_I32, value)] * LANES)

    x = builder.select(builder.fcmp_ordered("<", x, same(-88.0)), same(-88.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, same(88.0)), same(88.0), x)
    shifted = _multiply_add(builder, x, same(LOG2_E), same(12582912.0))
    n = builder.fsub(shifted, same(12582912.0))
    r = _multiply_add(builder, n, same(-LN_2_HIGH), x)
    r = _multiply_add(builder, n, same(-LN_2_LOW), r)
    p = same(EXP_P[0])
    for c in EXP_P[1:]:
        p = _multiply_add(builder, p, r, same(c))
    p = builder.fadd(_multiply_add(builder, builder.fmul(p, r), r, r), same(1.0))
    power = builder.add(builder.shl(builder.bitcast(shifted, whole(0).type), whole(23)), whole(0x3F800000))
    return builder.fmul(p, builder.bitcast(power, _VECTOR))


@intrinsic
def exp_row(_context, x, x0, n, base):
    """x[x0 : x0 + n] = exp(x - base) in place; returns its sum."""

    def codegen(context, builder, signature, arguments):
        _, x0, n, base = arguments
        x = _data(context, builder, signature.args[0], arguments[0])
        base = _splat(builder, base)

        def step(k, sums, mask=None):
            at = builder.add(x0, k)
            value = _exp(builder, builder.fsub(_load(builder, types.float32, x, at, mask), base))
            _store(builder, value, x, at, mask)
            counted = value if mask is None else builder.select(mask, value, ir.Constant(_VECTOR, None))
            return [builder.fadd(sums[0], counted)]

        (total,) = _every_vector(builder, n, [ir.Constant(_VECTOR, None)], step)
        return _add_lanes(builder, total)

    return types.float32(x, types.intp, types.intp, types.float32), codegen


@intrinsic
def swiglu_row(_context, gate, up, out, i0, n):
    """out[i0 : i0 + n] = gate / (1 + exp(-gate)) * up."""

    def codegen(context, builder, signature, arguments):
        gate, up, out = (_data(context, builder, signature.args[i], arguments[i]) for i in range(3))
        i0, n = arguments[3:]

        def step(k, sums, mask=None):
            at = builder.add(i0, k)
            x, y = (_load(builder, types.float32, a, at, mask) for a in (gate, up))
            one = ir.Constant(_VECTOR, [ir.Constant(_F32, 1.0)] * LANES)
            silu = builder.fdiv(x, builder.fadd(one, _exp(builder, builder.fneg(x))))
            _store(builder, builder.fmul(silu, y), out, at, mask)
            return sums

        _every_vector(builder, n, [], step)
        return context.get_dummy_value()

    return types.void(gate, up, out, types.intp, types.intp), codegen


@intrinsic
def transpose_tile(_context, w, w0, ldw, rows, cols, out, out0, ldo):
    """out[out0 + k ldo + n] = w[w0 + n ldw + k] as float32 for n < LANES, k < TILE_K; reads only n < rows, k < cols.

    16-bit numbers are moved in pairs (k, k + 1) and widened afterwards: half the work. Neighbours are zipped log2(LANES)
    times: (a, b) half the set apart become the two halves of a0 b0 a1 b1 ...
    """

    def codegen(context, builder, signature, arguments):
        _, w0, ldw, rows, cols, _, out0, ldo = arguments
        w, out = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 5))
        dtype = signature.args[0].dtype
        last = builder.sub(rows, _I64(1))
        at = []
        for n in range(LANES):
            row = builder.select(builder.icmp_signed("<", _I64(n), last), _I64(n), last)
            at.append(builder.add(w0, builder.mul(row, ldw)))

        def put(k, vector):
            _store(builder, vector, out, builder.add(out0, builder.mul(_I64(k), ldo)))

        if dtype == types.float32:
            for k in (0, LANES):
                mask = _mask(builder, builder.sub(cols, _I64(k)))
                vectors = [_load(builder, dtype, w, builder.add(x, _I64(k)), mask) for x in at]
                for i, vector in enumerate(_zip(builder, vectors)):
                    put(k + i, vector)
        else:
            mask = _mask(builder, cols, TILE_K)
            pairs = ir.VectorType(_I32, LANES)
            raw = [_load_raw(builder, _I16, TILE_K, w, x, mask) for x in at]
            shift = ir.Constant(pairs, [ir.Constant(_I32, 16)] * LANES)
            high = ir.Constant(pairs, [ir.Constant(_I32, -0x10000)] * LANES)
            for i, pair in enumerate(_zip(builder, [builder.bitcast(x, pairs) for x in raw])):
                if dtype == types.uint16:
                    put(2 * i, builder.bitcast(builder.shl(pair, shift), _VECTOR))
                    put(2 * i + 1, builder.bitcast(builder.and_(pair, high), _VECTOR))
                else:
                    for k, half in enumerate((pair, builder.lshr(pair, shift))):
                        half = builder.trunc(half, ir.VectorType(_I16, LANES))
                        half = builder.bitcast(half, ir.VectorType(ir.HalfType(), LANES))
                        put(2 * i + k, builder.fpext(half, _VECTOR))
        return context.get_dummy_value()

    size = types.intp
    return types.void(w, size, size, size, size, out, size, size), codegen


def _zip(builder, vectors):
    """LANES vectors of LANES values, transposed."""
    half = LANES // 2
    order = [j // 2 + LANES * (j % 2) for j in range(2 * LANES)]
    index = ir.VectorType(_I32, LANES)
    sides = [ir.Constant(index, [ir.Constant(_I32, i) for i in part]) for part in (order[:LANES], order[LANES:])]
    for _ in range(half.bit_length()):
        vectors = [builder.shuffle_vector(vectors[i], vectors[i + half], side) for i in range(half) for side in sides]
    return vectors


@intrinsic
def sum_tile(_context, p, p0, ldp, v, v0, ldv, n, out, out0, ldo, keep, keep0, first, width, rows):
    """out[out0 + r ldo + d] = keep[keep0 + r] out[..] + sum_s p[p0 + r ldp + s] v[v0 + s ldv + d].

    For r < rows, d < width, s < n; width is at most LANES, or SUM_VECTORS * LANES, or twice that for half the rows.
    `first`: whatever out holds counts as 0.
    """

    def codegen(context, builder, signature, arguments):
        def emit(most_rows, vectors):
            cases = {
                r: lambda r=r: _emit_sums(context, builder, signature, arguments, r, vectors)
                for r in range(1, most_rows + 1)
            }
            _choose(builder, arguments[-1], cases)

        width = arguments[-2]
        full = SUM_VECTORS * LANES
        kinds = {LANES: (SUM_ROWS, 1), full: (SUM_ROWS, SUM_VECTORS), 2 * full: (SUM_ROWS // 2, 2 * SUM_VECTORS)}
        kind = builder.select(builder.icmp_signed("<", width, _I64(LANES)), _I64(LANES), width)
        _choose(builder, kind, {w: lambda shape=shape: emit(*shape) for w, shape in kinds.items()})
        return context.get_dummy_value()

    size = types.intp
    arguments = (p, size, size, v, size, size, size, out, size, size, keep, size, types.boolean, size, size)
    return types.void(*arguments), codegen


MASKED = 64  # numbers that one word of bits speaks for


@intrinsic
def sum_masked(_context, x, x0, ldx, bits, b0, n, out, out0, ldo, rows):
    """out[out0 + r ldo + i] = sum of x[x0 + r ldx + d] over the d < n whose word bits[b0 + d] has bit i; i < MASKED.

    For r < rows, at most SUM_ROWS. A part of a word is a mask of lanes as it is, so nothing is unpacked.
    """

    def codegen(context, builder, signature, arguments):
        for first in range(0, MASKED // LANES, SUM_VECTORS):
            cases = {
                r: lambda r=r, first=first: _emit_masked_sums(context, builder, signature, arguments, r, first)
                for r in range(1, SUM_ROWS + 1)
            }
            _choose(builder, arguments[-1], cases)
        return context.get_dummy_value()

    size = types.intp
    return types.void(x, size, size, bits, size, size, out, size, size, size), codegen


def _emit_masked_sums(context, builder, signature, arguments, rows, first):
    """The part of sum_masked for SUM_VECTORS vectors from the first on."""
    _, x0, ldx, _, b0, n, _, out0, ldo, _ = arguments
    x, bits, out = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 3, 6))
    x = builder.bitcast(x, _F32.as_pointer())
    part = ir.IntType(LANES)  # of a word
    bits = builder.bitcast(bits, part.as_pointer())
    x_at = [builder.add(x0, builder.mul(_I64(r), ldx)) for r in range(rows)]

    def step(d, sums):
        word = builder.mul(builder.add(b0, d), _I64(MASKED // LANES))
        places = [builder.gep(bits, [builder.add(word, _I64(first + u))]) for u in range(SUM_VECTORS)]
        masks = [builder.bitcast(builder.load(place), _MASK) for place in places]
        x_r = [_splat(builder, builder.load(builder.gep(x, [builder.add(at, d)]))) for at in x_at]
        new = []
        for i, total in enumerate(sums):
            more = builder.fadd(total, x_r[i // SUM_VECTORS])
            new.append(builder.select(masks[i % SUM_VECTORS], more, total))
        return new

    sums = _loop(builder, n, 1, [ir.Constant(_VECTOR, None)] * (rows * SUM_VECTORS), step)
    for i, total in enumerate(sums):
        row, u = divmod(i, SUM_VECTORS)
        at = builder.add(out0, builder.mul(_I64(row), ldo))
        _store(builder, total, out, builder.add(at, _I64((first + u) * LANES)))


@intrinsic
def above(_context, x, x0, limit):
    """A word whose bit i says whether x[x0 + i] > limit, for i < MASKED; NaN is above nothing."""

    def codegen(context, builder, signature, arguments):
        x, limit = _data(context, builder, signature.args[0], arguments[0]), _splat(builder, arguments[2])
        word = _I64(0)
        for i in range(0, MASKED, LANES):
            lanes = _load(builder, types.float32, x, builder.add(arguments[1], _I64(i)))
            part = builder.bitcast(builder.fcmp_ordered(">", lanes, limit), ir.IntType(LANES))
            word = builder.or_(word, builder.shl(builder.zext(part, _I64), _I64(i)))
        return word

    return types.uint64(x, types.intp, types.float32), codegen


@intrinsic
def lowest_bit(_context, word):
    """The place of the lowest bit that is set."""

    def codegen(_context, builder, _signature, arguments):
        return _call(builder, "llvm.cttz.i64", _I64, [arguments[0], _I1(1)])

    return types.int64(types.uint64), codegen
