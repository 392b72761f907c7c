"""What a compiled loop on a CPU cannot be told in Python and does best in vector instructions: dot products, sums of rows, e^x, logarithms.

A dot product of int8 with int16 in pairs of lanes is one instruction on x86 (pmaddwd, with VNNI also the sum); LLVM finds it in the
form that is written here, and writes it as it can elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 4  # of activations that share one reading of a row of weights
WIDTH = 32  # numbers taken at a time: a row must be a multiple of it
_AHEAD = 4096  # bytes of the weights behind those in use that are asked for from memory

f32, i32 = np.float32, np.int32


def _dotting(rows: int) -> Any:
    """The function that gives the dot products of row o of `weight` [out, in] int8 with rows r, …, r + `rows` - 1 of x [n, in] int16.

    Both in C order; a tuple of int32. The sums must fit: Σ|weight[o]| · max|x| < 2³¹.
    """

    @intrinsic
    def dots(typing: Any, weight: Any, o: Any, x: Any, r: Any) -> tuple[Any, Any]:
        signature = types.UniTuple(types.int32, rows)(weight, types.intp, x, types.intp)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, x = (context.make_array(signature.args[at])(context, builder, value=arguments[at]) for at in (0, 2))
            size = cgutils.unpack_tuple(builder, weight.shape)[1]
            row = builder.gep(weight.data, [builder.mul(arguments[1], size)])
            starts = [
                builder.gep(x.data, [builder.mul(builder.add(arguments[3], size.type(j)), size)]) for j in range(rows)
            ]
            word, byte = ir.IntType(32), ir.IntType(8)
            wide, sums = ir.VectorType(word, WIDTH), ir.VectorType(word, WIDTH // 2)
            evens, odds = (ir.Constant(sums, list(range(first, WIDTH, 2))) for first in (0, 1))
            before, loop, after = builder.block, builder.append_basic_block("dots"), builder.append_basic_block("sums")

            def lanes(start: Any, bits: int) -> Any:
                place = builder.bitcast(builder.gep(start, [k]), ir.VectorType(ir.IntType(bits), WIDTH).as_pointer())
                return builder.sext(builder.load(place, align=bits // 8), wide)

            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(size.type)
            totals = [builder.phi(sums) for _ in range(rows)]
            prefetch = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), (byte.as_pointer(), word, word, word)),
                "llvm.prefetch.p0",
            )
            builder.call(prefetch, [builder.gep(row, [builder.add(k, size.type(_AHEAD))]), word(0), word(3), word(1)])
            weights = lanes(row, 8)
            added = []
            for total, start in zip(totals, starts, strict=True):
                products = builder.mul(weights, lanes(start, 16))
                pairs = [builder.shuffle_vector(products, products, side) for side in (evens, odds)]
                added.append(builder.add(total, builder.add(*pairs)))
            k_next = builder.add(k, size.type(WIDTH))
            builder.cbranch(builder.icmp_signed("<", k_next, size), loop, after)
            for phi, zero, new in zip([k, *totals], [0, *[[0] * (WIDTH // 2)] * rows], [k_next, *added], strict=True):
                phi.add_incoming(ir.Constant(phi.type, zero), before)
                phi.add_incoming(new, loop)
            builder.position_at_end(after)
            reduce = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(word, (sums,)), f"llvm.vector.reduce.add.v{WIDTH // 2}i32"
            )
            return cgutils.pack_array(builder, [builder.call(reduce, [total]) for total in added])

        return signature, code

    return dots


dots, dot = _dotting(ROWS), _dotting(1)


def _adding(queries: int, vectors: int) -> Any:
    """The function that adds to rows q, …, q + `queries` - 1 and 16 · `vectors` columns of y, from column `first` on, what `add_rows` adds."""

    @intrinsic
    def add(typing: Any, weights: Any, rows: Any, q: Any, first: Any, y: Any) -> tuple[Any, Any]:
        signature = types.void(weights, rows, types.intp, types.intp, y)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, rows, y = (
                context.make_array(signature.args[at])(context, builder, value=arguments[at]) for at in (0, 1, 4)
            )
            count, size = cgutils.unpack_tuple(builder, rows.shape)
            lanes, nothing = (
                ir.VectorType(ir.FloatType(), 16),
                ir.Constant(ir.VectorType(ir.FloatType(), 16), [0.0] * 16),
            )
            same = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)

            def row(array: Any, i: Any) -> Any:
                strides = cgutils.unpack_tuple(builder, array.strides)
                return cgutils.pointer_add(builder, array.data, builder.mul(i, strides[0]))

            def columns(start: Any, v: int) -> Any:
                place = builder.gep(start, [builder.add(arguments[3], size.type(16 * v))])
                return builder.bitcast(place, lanes.as_pointer())

            places = [builder.add(arguments[2], size.type(j)) for j in range(queries)]
            shares = [row(weights, place) for place in places]
            sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(vectors)] for _ in places]
            with cgutils.for_range(builder, count) as loop:
                values = [builder.load(columns(row(rows, loop.index), v), align=4) for v in range(vectors)]
                for share, totals in zip(shares, sums, strict=True):
                    one = builder.insert_element(
                        nothing, builder.load(builder.gep(share, [loop.index])), ir.Constant(ir.IntType(32), 0)
                    )
                    weight = builder.shuffle_vector(one, one, same)
                    for total, value in zip(totals, values, strict=True):
                        product = builder.fmul(weight, value, flags=["contract"])
                        builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
            for place, totals in zip(places, sums, strict=True):
                for v, total in enumerate(totals):
                    at = columns(row(y, place), v)
                    builder.store(builder.fadd(builder.load(at, align=4), builder.load(total)), at, align=4)
            return context.get_dummy_value()

        return signature, code

    return add


_add_4, _add_3, _add_2, _add_1, _add_part = _adding(4, 2), _adding(3, 2), _adding(2, 2), _adding(1, 2), _adding(1, 1)


@njit(cache=True)
def add_rows(weights: Any, rows: Any, y: Any) -> None:
    """y [q, m] += weights [q, n] · rows [n, m], all float32, numbers of a row side by side.

    A row of y goes through the same sums whatever stands beside it.
    """
    queries, size = y.shape
    for q in range(0, queries, 4):
        first = 0
        while first + 32 <= size:
            if queries - q >= 4:
                _add_4(weights, rows, q, first, y)
            elif queries - q == 3:
                _add_3(weights, rows, q, first, y)
            elif queries - q == 2:
                _add_2(weights, rows, q, first, y)
            else:
                _add_1(weights, rows, q, first, y)
            first += 32
        for j in range(q, min(q + 4, queries)):
            at = first
            while at + 16 <= size:
                _add_part(weights, rows, j, at, y)
                at += 16
            for k in range(at, size):
                total = np.float32(0)
                for i in range(len(rows)):
                    total += weights[j, i] * rows[i, k]
                y[j, k] += total


@njit(cache=True, fastmath={"contract"})
def exp(x: np.float32) -> np.float32:
    """e^x to a unit or two in the last place (the polynomial of Cephes' expf), 0 below −87; NaN stays."""
    within = f32(-87.3) if x < f32(-87.3) else x
    within = f32(88.3) if within > f32(88.3) else within
    n = np.floor(within * f32(1.44269504) + f32(0.5))
    r = within - n * f32(0.693359375) - n * f32(-2.12194440e-4)
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    power = i32(i32(i32(n) + i32(127)) << i32(23)).view(f32)
    return f32(0) if x < f32(-87.3) else (p * r * r + r + f32(1)) * power


@njit(cache=True, fastmath={"contract"})
def exponential(u: np.float32) -> np.float32:
    """−ln(1 − u) for u in (0, 1) to a unit or two in the last place also where it is tiny (the polynomial of Cephes' logf)."""
    rest = f32(1) - u
    bits = i32(f32(rest).view(i32) - i32(0x3F3504F3))  # rest = m · 2^n with m from √½ to √2
    n = i32(bits >> i32(23))
    m = i32(i32(bits & i32(0x7FFFFF)) + i32(0x3F3504F3)).view(f32)
    x = -u if n == 0 else m - f32(1)  # exact also where 1 − u is rounded to 1
    p = f32(7.0376836292e-2)
    p = p * x + f32(-1.1514610310e-1)
    p = p * x + f32(1.1676998740e-1)
    p = p * x + f32(-1.2420140846e-1)
    p = p * x + f32(1.4249322787e-1)
    p = p * x + f32(-1.6668057665e-1)
    p = p * x + f32(2.0000714765e-1)
    p = p * x + f32(-2.4999993993e-1)
    p = p * x + f32(3.3333331174e-1)
    square = x * x
    low = p * x * square + f32(n) * f32(-2.12194440e-4) - f32(0.5) * square
    return -(x + low + f32(n) * f32(0.693359375))
