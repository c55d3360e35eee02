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
DOT_ROWS, DOT_COLS = (4, 6) if WIDE else (2, 4)
SUM_ROWS, SUM_VECTORS = (6, 4) if WIDE else (3, 4)

intrinsic: Any = extending.intrinsic  # typed as if it were called with the typing context, too

_I1, _I16, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_MASK = ir.VectorType(_I1, LANES)


def _call(builder, name, result, arguments, **kwargs):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **kwargs)


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _mask(builder, count):
    """Lanes 0 .. count-1."""
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [ir.Constant(_I32, i) for i in range(LANES)])
    limit = builder.insert_element(ir.Constant(lanes.type, None), builder.trunc(count, _I32), _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), None)
    return builder.icmp_signed("<", lanes, builder.shuffle_vector(limit, limit, zeros))


@intrinsic
def take(_context, counter):
    """The counter's value before this call, which adds one to it: no two threads get the same."""

    def codegen(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        return builder.atomic_rmw("add", data, _I64(1), "monotonic")

    return types.int64(counter), codegen


def _load(builder, dtype, data, offset, mask=None):
    """LANES values from `offset` on, as float32; masked lanes are 0 and are not touched in memory."""
    item = _F32 if dtype == types.float32 else _I16
    vector = ir.VectorType(item, LANES)
    bits = "f32" if item is _F32 else "i16"
    place = builder.gep(builder.bitcast(data, item.as_pointer()), [offset])
    place = builder.bitcast(place, vector.as_pointer())
    if mask is None:
        raw = builder.load(place)
        raw.align = 1  # weights of a file may start anywhere
    else:
        name = f"llvm.masked.load.v{LANES}{bits}.p0"
        raw = _call(builder, name, vector, [place, _I32(1), mask, ir.Constant(vector, None)])
    if dtype == types.float32:
        return raw
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


def _split(builder, n):
    """n as a multiple of LANES and a remainder."""
    whole = builder.and_(n, _I64(-LANES))
    return whole, builder.sub(n, whole)


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
    _, a0, lda, _, b0, ldb, n, _, c0, ldc, add, _ = arguments
    a, b, c = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 3, 7))
    a_at = [builder.add(a0, builder.mul(_I64(i), lda)) for i in range(rows)]
    b_at = [builder.add(b0, builder.mul(_I64(j), ldb)) for j in range(cols)]

    def step(k, sums, mask=None):
        b_j = [_load(builder, signature.args[3].dtype, b, builder.add(at, k), mask) for at in b_at]
        new = []
        for i, at in enumerate(a_at):
            a_i = _load(builder, signature.args[0].dtype, a, builder.add(at, k), mask)
            new += [_multiply_add(builder, a_i, b_j[j], sums[i * cols + j]) for j in range(cols)]
        return new

    sums = _every_vector(builder, n, [ir.Constant(_VECTOR, None)] * (rows * cols), step)
    c = builder.bitcast(c, _F32.as_pointer())
    for j in range(cols):
        at = builder.add(c0, builder.mul(_I64(j), ldc))
        for i in range(rows):
            place = builder.gep(c, [builder.add(at, _I64(i))])
            old = builder.select(add, builder.load(place), _F32(0.0))
            name = f"llvm.vector.reduce.fadd.v{LANES}f32"
            total = _call(builder, name, _F32, [_F32(0.0), sums[i * cols + j]], fastmath=("reassoc",))
            builder.store(builder.fadd(old, total), place)


def _make_dots(rows):
    @intrinsic
    def dots(_context, a, a0, lda, b, b0, ldb, n, c, c0, ldc, add, cols):
        def codegen(context, builder, signature, arguments):
            cases = {
                j: lambda j=j: _emit_dots(context, builder, signature, arguments, rows, j)
                for j in range(1, DOT_COLS + 1)
            }
            _choose(builder, arguments[-1], cases)
            return context.get_dummy_value()

        size = types.intp
        return types.void(a, size, size, b, size, size, size, c, size, size, types.boolean, size), codegen

    return dots


# c[c0 + j ldc + i] = (add: c[..]) + sum_k a[a0 + i lda + k] b[b0 + j ldb + k] for i < DOT_ROWS (or 1), j < cols, k < n.
dot_tile, dot_row = _make_dots(DOT_ROWS), _make_dots(1)


def _emit_sums(context, builder, signature, arguments, rows, vectors):
    _, p0, ldp, _, v0, ldv, n, _, out0, ldo, _, keep0, width, _ = arguments
    p, v, out, keep = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 3, 7, 10))
    mask = _mask(builder, width) if vectors == 1 else None
    p, keep = (builder.bitcast(x, _F32.as_pointer()) for x in (p, keep))
    p_at = [builder.add(p0, builder.mul(_I64(r), ldp)) for r in range(rows)]
    row_at = [builder.add(out0, builder.mul(_I64(r), ldo)) for r in range(rows)]
    out_at = [builder.add(at, _I64(LANES * u)) for at in row_at for u in range(vectors)]
    factors = [_splat(builder, builder.load(builder.gep(keep, [builder.add(keep0, _I64(r))]))) for r in range(rows)]
    old = [_load(builder, types.float32, out, at, mask) for at in out_at]
    sums = [builder.fmul(factors[i // vectors], x) for i, x in enumerate(old)]

    def step(s, sums):
        at = builder.add(v0, builder.mul(s, ldv))
        v_u = [_load(builder, types.float32, v, builder.add(at, _I64(LANES * u)), mask) for u in range(vectors)]
        p_r = [_splat(builder, builder.load(builder.gep(p, [builder.add(at, s)]))) for at in p_at]
        return [_multiply_add(builder, p_r[i // vectors], v_u[i % vectors], x) for i, x in enumerate(sums)]

    for at, total in zip(out_at, _loop(builder, n, 1, sums, step), strict=True):
        _store(builder, total, out, at, mask)


@intrinsic
def widen_row(_context, w, w0, n, out, out0):
    """out[out0 : out0 + n] = w[w0 : w0 + n] as float32, exactly."""

    def codegen(context, builder, signature, arguments):
        _, w0, n, _, out0 = arguments
        w, out = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 3))

        def step(k, sums, mask=None):
            value = _load(builder, signature.args[0].dtype, w, builder.add(w0, k), mask)
            _store(builder, value, out, builder.add(out0, k), mask)
            return sums

        _every_vector(builder, n, [], step)
        return context.get_dummy_value()

    size = types.intp
    return types.void(w, size, size, out, size), codegen


@intrinsic
def sum_tile(_context, p, p0, ldp, v, v0, ldv, n, out, out0, ldo, keep, keep0, width, rows):
    """out[out0 + r ldo + d] = keep[keep0 + r] out[..] + sum_s p[p0 + r ldp + s] v[v0 + s ldv + d].

    For r < rows, d < width, s < n; width is SUM_VECTORS * LANES, or at most LANES.
    """

    def codegen(context, builder, signature, arguments):
        def emit(vectors):
            cases = {
                r: lambda r=r: _emit_sums(context, builder, signature, arguments, r, vectors)
                for r in range(1, SUM_ROWS + 1)
            }
            _choose(builder, arguments[-1], cases)

        with builder.if_else(builder.icmp_signed(">", arguments[-2], _I64(LANES))) as (full, part):
            with full:
                emit(SUM_VECTORS)
            with part:
                emit(1)
        return context.get_dummy_value()

    size = types.intp
    arguments = (p, size, size, v, size, size, size, out, size, size, keep, size, size, size)
    return types.void(*arguments), codegen
