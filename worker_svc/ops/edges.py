"""What stands around the tiles of a product: rows laid out before them, sums added and rounded after them.

Knows how each is written in LLVM's text. Does not know tiles or threads. Invariant: rounding is to nearest, ties to
even, a NaN stays one; nothing is added in another order than it is given.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from worker_svc.ops.attention_tiles import EXP_TEXT
from worker_svc.ops.native import assemble

MAX_ROWS = 8
# Places in the table of addresses: lay out R rows of fp32 and of bfloat16 at R - 1, then the rest.
LAY, LAY_HALF, ADD, ROUND, COPY, EXP, SIZE = 0, MAX_ROWS, *range(2 * MAX_ROWS, 2 * MAX_ROWS + 5)


@functools.cache
def edges() -> NDArray[np.int64]:
    """Addresses of
    lay(x, bytes from row to row, k, out)   R rows become [k, R] in fp32
    add(a, b, n)                            a[i] += b[i] in fp32, n a multiple of 16
    round(sums, bytes, bias, out, bytes, rows), copy(...)
                                            16 sums of each row, plus a bias unless it is 0, to bfloat16 or fp32
    exp(x, n)                               x[:n] = exp(x[:n]), n a multiple of 16
    """
    names = [f"lay{half}_{rows}" for half in (0, 1) for rows in range(1, MAX_ROWS + 1)] + [
        "add",
        "round",
        "copy",
        "exp",
    ]
    lays = [_lay(rows, half) for half in (False, True) for rows in range(1, MAX_ROWS + 1)]
    code = assemble("\n".join([*lays, _ADD, _finish("round", _ROUNDED), _finish("copy", _COPIED), EXP_TEXT]), names)
    return np.array([code.addresses[name] for name in names], np.int64)


def _lay(rows: int, half: bool) -> str:
    lines = [f"define void @lay{int(half)}_{rows}(ptr %x, i64 %stride, i64 %k, ptr %out) {{\nentry:"]
    for r in range(rows):
        lines.append(f"  %o{r} = mul i64 %stride, {r}\n  %x{r} = getelementptr i8, ptr %x, i64 %o{r}")
    lines.append("  br label %loop\nloop:\n  %i = phi i64 [ 0, %entry ], [ %n, %body ]")
    lines.append("  %more = icmp ult i64 %i, %k\n  br i1 %more, label %body, label %end\nbody:")
    lines.append(f"  %at = mul i64 %i, {4 * rows}\n  %to = getelementptr i8, ptr %out, i64 %at")
    for r in range(rows):
        kind = "i16" if half else "i32"
        lines.append(f"  %p{r} = getelementptr {kind}, ptr %x{r}, i64 %i\n  %v{r} = load {kind}, ptr %p{r}")
        if half:
            lines.append(f"  %z{r} = zext i16 %v{r} to i32\n  %w{r} = shl i32 %z{r}, 16")
        lines.append(f"  %q{r} = getelementptr i8, ptr %to, i64 {4 * r}")
        lines.append(f"  store i32 %{'w' if half else 'v'}{r}, ptr %q{r}")
    lines.append("  %n = add i64 %i, 1\n  br label %loop\nend:\n  ret void\n}")
    return "\n".join(lines)


_ADD = """
define void @add(ptr %a, ptr %b, i64 %n) {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %end
body:
  %p = getelementptr float, ptr %a, i64 %i
  %q = getelementptr float, ptr %b, i64 %i
  %x = load <16 x float>, ptr %p, align 4
  %y = load <16 x float>, ptr %q, align 4
  %z = fadd <16 x float> %x, %y
  store <16 x float> %z, ptr %p, align 4
  %j = add i64 %i, 16
  br label %loop
end:
  ret void
}"""


def _all(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 16) + ">"


_COPIED = "  store <16 x float> %x, ptr %out_row, align 4"
_ROUNDED = f"""  %b = bitcast <16 x float> %x to <16 x i32>
  %high = lshr <16 x i32> %b, {_all(16)}
  %odd = and <16 x i32> %high, {_all(1)}
  %up = add <16 x i32> %b, {_all(0x7FFF)}
  %even = add <16 x i32> %up, %odd
  %near = lshr <16 x i32> %even, {_all(16)}
  %nan = fcmp uno <16 x float> %x, %x
  %said = select <16 x i1> %nan, <16 x i32> {_all(0x7FC0)}, <16 x i32> %near
  %half = trunc <16 x i32> %said to <16 x i16>
  store <16 x i16> %half, ptr %out_row, align 2"""


def _finish(name: str, store: str) -> str:
    return f"""
define void @{name}(ptr %sums, i64 %sums_bytes, ptr %bias, ptr %out, i64 %out_bytes, i64 %rows) {{
entry:
  %none = icmp eq ptr %bias, null
  br i1 %none, label %start, label %read
read:
  %given = load <16 x float>, ptr %bias, align 4
  br label %start
start:
  %y = phi <16 x float> [ zeroinitializer, %entry ], [ %given, %read ]
  br label %loop
loop:
  %i = phi i64 [ 0, %start ], [ %j, %body ]
  %more = icmp ult i64 %i, %rows
  br i1 %more, label %body, label %end
body:
  %so = mul i64 %i, %sums_bytes
  %oo = mul i64 %i, %out_bytes
  %sums_row = getelementptr i8, ptr %sums, i64 %so
  %out_row = getelementptr i8, ptr %out, i64 %oo
  %s = load <16 x float>, ptr %sums_row, align 4
  %biased = fadd <16 x float> %s, %y
  %x = select i1 %none, <16 x float> %s, <16 x float> %biased
{store}
  %j = add i64 %i, 1
  br label %loop
end:
  ret void
}}"""
