"""The innermost loops of attention in LLVM's text: scores of 16 keys, the largest score, weighted values.

Knows how each is written. Does not know sequences, blocks or masks. Invariant, all in fp32 and for each row alone:

    score     eight sums by index mod 8, each `fma(q[e], k[e], sum)` over ascending e, folded by halves
    largest   the largest of n scores
    weighted  fma(p[j], v[j, e], sum) over ascending j, for each e alone

Lengths of rows are multiples of 16. Vectors have eight lanes on every processor, since the sums are by index mod 8.
"""

import functools
import struct

import numpy as np
from numpy.typing import NDArray

from worker_svc.ops.native import assemble

WIDEN, SCORES, LARGEST, WEIGH_16, WEIGH_64, EXP, COUNT = range(7)
KEYS = 16  # of one call of SCORES


@functools.cache
def attention_tiles() -> NDArray[np.int64]:
    """Addresses of
    widen(x, y, n)                     y[:n] = x[:n], bfloat16 to fp32
    scores(q, keys, n, out)            of 16 keys, [16, n]
    largest(x, n, out)                 out[0] = the largest
    exp(x, n)                          x[:n] = exp(x[:n])
    weigh_16(p, count, v, n, sums)     16 columns of v, [count, n]; weigh_64: 64 columns
    """
    names = ("widen", "scores", "largest", "weigh_16", "weigh_64", "exp")
    texts = (_DECLARED, _WIDEN, _scores(), _LARGEST, _weigh(16), _weigh(64), EXP_TEXT)
    code = assemble("\n".join(texts), names)
    return np.array([code.addresses[name] for name in names], np.int64)


_DECLARED = "declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)"

_SIXTEENS = "<" + ", ".join(["i32 16"] * 16) + ">"
_WIDEN = f"""
define void @widen(ptr %x, ptr %y, i64 %n) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %end
body:
  %p = getelementptr i16, ptr %x, i64 %i
  %q = getelementptr float, ptr %y, i64 %i
  %b = load <16 x i16>, ptr %p, align 2
  %w = zext <16 x i16> %b to <16 x i32>
  %s = shl <16 x i32> %w, {_SIXTEENS}
  store <16 x i32> %s, ptr %q, align 4
  %j = add i64 %i, 16
  br label %loop
end:
  ret void
}}"""

_LARGEST = """
define void @largest(ptr %x, i64 %n, ptr %out) {
entry:
  %first = load <16 x float>, ptr %x, align 4
  br label %loop
loop:
  %i = phi i64 [ 16, %entry ], [ %j, %body ]
  %m = phi <16 x float> [ %first, %entry ], [ %new, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %lanes
body:
  %p = getelementptr float, ptr %x, i64 %i
  %v = load <16 x float>, ptr %p, align 4
  %c = fcmp ogt <16 x float> %v, %m
  %new = select <16 x i1> %c, <16 x float> %v, <16 x float> %m
  %j = add i64 %i, 16
  br label %loop
lanes:
  br label %lane
lane:
  %l = phi i64 [ 0, %lanes ], [ %l1, %lane ]
  %a = phi float [ 0xFFF0000000000000, %lanes ], [ %b, %lane ]
  %e = extractelement <16 x float> %m, i64 %l
  %g = fcmp ogt float %e, %a
  %b = select i1 %g, float %e, float %a
  %l1 = add i64 %l, 1
  %go = icmp ult i64 %l1, 16
  br i1 %go, label %lane, label %end
end:
  store float %b, ptr %out, align 4
  ret void
}"""


def _splat(value: float) -> str:
    """Sixteen times an fp32 number, which the text states as the fp64 that equals it."""
    word = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<f", value))[0]))[0]
    return "<" + ", ".join([f"float 0x{word:016X}"] * 16) + ">"


def _exp_text() -> str:
    """exp within [-87, 88] (Cephes' expf, nothing contracted); a NaN stays one. The bits of `compiled._exp`."""
    v = "<16 x float>"
    steps = [
        f"%big = fcmp ogt {v} %x, {_splat(-87.0)}",
        f"%c0 = select <16 x i1> %big, {v} %x, {v} {_splat(-87.0)}",
        f"%small = fcmp olt {v} %c0, {_splat(88.0)}",
        f"%c = select <16 x i1> %small, {v} %c0, {v} {_splat(88.0)}",
        f"%t0 = fmul {v} %c, {_splat(1.442695041)}",
        f"%t1 = fadd {v} %t0, {_splat(0.5)}",
        f"%n = call {v} @llvm.floor.v16f32({v} %t1)",
        f"%h = fmul {v} %n, {_splat(0.693359375)}",
        f"%l = fmul {v} %n, {_splat(-2.12194440e-4)}",
        f"%r0 = fsub {v} %c, %h",
        f"%r = fsub {v} %r0, %l",
    ]
    sum_ = _splat(1.9875691500e-4)
    for i, term in enumerate((1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)):
        steps += [f"%m{i} = fmul {v} {sum_}, %r", f"%y{i} = fadd {v} %m{i}, {_splat(term)}"]
        sum_ = f"%y{i}"
    steps += [
        f"%rr = fmul {v} %r, %r",
        f"%z0 = fmul {v} %y4, %rr",
        f"%z1 = fadd {v} %z0, %r",
        f"%z = fadd {v} %z1, {_splat(1.0)}",
        f"%ni = fptosi {v} %n to <16 x i32>",
        "%biased = add <16 x i32> %ni, <" + ", ".join(["i32 127"] * 16) + ">",
        "%bits = shl <16 x i32> %biased, <" + ", ".join(["i32 23"] * 16) + ">",
        f"%scale = bitcast <16 x i32> %bits to {v}",
        f"%e = fmul {v} %z, %scale",
        f"%nan = fcmp uno {v} %x, %x",
        f"%result = select <16 x i1> %nan, {v} %x, {v} %e",
    ]
    return f"""
declare {v} @llvm.floor.v16f32({v})
define void @exp(ptr %a, i64 %count) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %body ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %body, label %end
body:
  %p = getelementptr float, ptr %a, i64 %i
  %x = load {v}, ptr %p, align 4
  {chr(10).join("  " + step for step in steps)}
  store {v} %result, ptr %p, align 4
  %j = add i64 %i, 16
  br label %loop
end:
  ret void
}}"""


EXP_TEXT = _exp_text()

# Two vectors of partial sums become one, half as many sums for each key; the last one is put in order.
_HALVES = (
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),  # keys 0 1
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),  # keys 0 2 1 3
    ((0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)),  # keys 0 2 4 6 1 3 5 7
)
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _mask(lanes: tuple[int, ...]) -> str:
    return f"<{len(lanes)} x i32> <" + ", ".join(f"i32 {lane}" for lane in lanes) + ">"


def _scores() -> str:
    vector = "<8 x float>"
    lines = ["define void @scores(ptr %q, ptr %keys, i64 %n, ptr %out) {\nentry:\n  br label %half"]
    lines.append("half:\n  %h = phi i64 [ 0, %entry ], [ %h1, %done ]\n  %h8 = mul i64 %h, 8\n  %hn = mul i64 %h8, %n")
    lines.append("  %k0 = getelementptr float, ptr %keys, i64 %hn")
    for key in range(1, 8):
        lines.append(f"  %k{key} = getelementptr float, ptr %k{key - 1}, i64 %n")
    lines.append("  br label %loop\nloop:\n  %i = phi i64 [ 0, %half ], [ %j, %loop ]")
    for key in range(8):
        lines.append(f"  %a{key} = phi {vector} [ zeroinitializer, %half ], [ %b{key}, %loop ]")
    lines.append(f"  %qp = getelementptr float, ptr %q, i64 %i\n  %qv = load {vector}, ptr %qp, align 4")
    for key in range(8):
        lines.append(
            f"  %p{key} = getelementptr float, ptr %k{key}, i64 %i\n  %v{key} = load {vector}, ptr %p{key}, align 4"
        )
        terms = f"{vector} %qv, {vector} %v{key}, {vector} %a{key}"
        lines.append(f"  %b{key} = call {vector} @llvm.fma.v8f32({terms})")
    lines.append("  %j = add i64 %i, 8\n  %more = icmp ult i64 %j, %n\n  br i1 %more, label %loop, label %done\ndone:")
    sums = [f"%b{key}" for key in range(8)]
    for level, (low, high) in enumerate(_HALVES):
        made = []
        for pair in range(len(sums) // 2):
            both, name = f"{vector} {sums[2 * pair]}, {vector} {sums[2 * pair + 1]}", f"{level}_{pair}"
            lines.append(f"  %l{name} = shufflevector {both}, {_mask(low)}")
            lines.append(f"  %g{name} = shufflevector {both}, {_mask(high)}")
            lines.append(f"  %s{name} = fadd {vector} %l{name}, %g{name}")
            made.append(f"%s{name}")
        sums = made
    lines.append(f"  %sorted = shufflevector {vector} {sums[0]}, {vector} poison, {_mask(_ORDER)}")
    lines.append(f"  %op = getelementptr float, ptr %out, i64 %h8\n  store {vector} %sorted, ptr %op, align 4")
    lines.append("  %h1 = add i64 %h, 1\n  %again = icmp ult i64 %h1, 2\n  br i1 %again, label %half, label %end")
    lines.append("end:\n  ret void\n}")
    return "\n".join(lines)


def _weigh(columns: int) -> str:
    vector, parts = "<8 x float>", range(columns // 8)
    lines = [f"define void @weigh_{columns}(ptr %p, i64 %count, ptr %v, i64 %n, ptr %sums) {{\nentry:"]
    for c in parts:
        lines.append(
            f"  %o{c} = getelementptr float, ptr %sums, i64 {8 * c}\n  %s{c} = load {vector}, ptr %o{c}, align 4"
        )
    lines.append("  br label %loop\nloop:\n  %j = phi i64 [ 0, %entry ], [ %j1, %body ]")
    for c in parts:
        lines.append(f"  %a{c} = phi {vector} [ %s{c}, %entry ], [ %b{c}, %body ]")
    lines.append("  %more = icmp slt i64 %j, %count\n  br i1 %more, label %body, label %end\nbody:")
    lines.append("  %pp = getelementptr float, ptr %p, i64 %j\n  %w = load float, ptr %pp, align 4")
    lines.append(f"  %w1 = insertelement {vector} poison, float %w, i64 0")
    lines.append(f"  %ws = shufflevector {vector} %w1, {vector} poison, <8 x i32> zeroinitializer")
    lines.append("  %jn = mul i64 %j, %n\n  %row = getelementptr float, ptr %v, i64 %jn")
    for c in parts:
        lines.append(
            f"  %r{c} = getelementptr float, ptr %row, i64 {8 * c}\n  %x{c} = load {vector}, ptr %r{c}, align 4"
        )
        lines.append(f"  %b{c} = call {vector} @llvm.fma.v8f32({vector} %ws, {vector} %x{c}, {vector} %a{c})")
    lines.append("  %j1 = add i64 %j, 1\n  br label %loop\nend:")
    for c in parts:
        lines.append(f"  store {vector} %a{c}, ptr %o{c}, align 4")
    lines.append("  ret void\n}")
    return "\n".join(lines)
