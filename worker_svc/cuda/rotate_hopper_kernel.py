# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""`rows.rope_write_kernel` for one kv head of one token, as the beginning of its attention, in Gluon.

Knows a token's row of the qkv product and the layout of heads in it. Invariant: an element's operations, and the layout
that a head is summed in, are that kernel's (4 warps for 8 heads), so the bits are the same. Tests compare them.

Legend: H query heads, K kv heads, G = H / K of them a kv head, D head width; G + 2 <= 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _clipped(x, CLIP: gl.constexpr, clip):
    if CLIP:
        x = gl.where(x > clip, clip, gl.where(x < -clip, -clip, x.to(gl.float32))).to(x.dtype)
    return x


@gluon.jit
def rotated_heads(qkv, q_weight, k_weight, cosines, sines, token, h, position, epsilon, clip,
                  KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, CLIP: gl.constexpr,
                  NORM: gl.constexpr):  # fmt: skip
    """Two tensors [8, D / 2], the halves of: G rotated queries of kv head h, its rotated key, its value, padding."""
    HALF: gl.constexpr = D // 2
    HEADS: gl.constexpr = KV_HEADS * G
    L: gl.constexpr = gl.BlockedLayout([1, HALF // 16], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    d = gl.arange(0, HALF, gl.SliceLayout(0, L))
    head = gl.where(r < G, h * G + r, gl.where(r == G, HEADS + h, HEADS + KV_HEADS + h))
    at = qkv + (token * (HEADS + 2 * KV_HEADS) * D + gl.expand_dims(head * D, 1) + gl.expand_dims(d, 0))
    cosine = gl.expand_dims(gl.load(cosines + position * HALF + d), 0)
    sine = gl.expand_dims(gl.load(sines + position * HALF + d), 0)
    first = _clipped(gl.load(at), CLIP, clip)
    second = _clipped(gl.load(at + HALF), CLIP, clip)
    x = first.to(gl.float32)
    y = second.to(gl.float32)
    if NORM:
        is_query = gl.expand_dims(r < G, 1)
        square = gl.sum(x * x, 1) + gl.sum(y * y, 1)
        inverse = gl.expand_dims(gl.rsqrt(square / D + epsilon), 1)
        low = gl.where(is_query, gl.expand_dims(gl.load(q_weight + d), 0), gl.expand_dims(gl.load(k_weight + d), 0)).to(
            gl.float32
        )
        high = gl.where(
            is_query, gl.expand_dims(gl.load(q_weight + HALF + d), 0), gl.expand_dims(gl.load(k_weight + HALF + d), 0)
        )
        x = (x * inverse * low).to(first.dtype).to(gl.float32)
        y = (y * inverse * high.to(gl.float32)).to(first.dtype).to(gl.float32)
    rotated_x = gl.fma(x, cosine, -(y * sine)).to(first.dtype)
    rotated_y = gl.fma(y, cosine, x * sine).to(first.dtype)
    turned = gl.expand_dims(r <= G, 1)
    return gl.where(turned, rotated_x, first), gl.where(turned, rotated_y, second)


@gluon.jit
def write_heads(low, high, k_cache, v_cache, block, place, h,
                KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """The key and the value among `rotated_heads` to their place in a block of the cache [blocks, K, PAGE, D]."""
    HALF: gl.constexpr = D // 2
    L: gl.constexpr = gl.BlockedLayout([1, HALF // 16], [2, 16], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    d = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, L)), 0)
    to = ((block.to(gl.int64) * KV_HEADS + h) * PAGE + place) * D + d + 0 * r
    gl.store(k_cache + to, low, mask=(r == G) & (d >= 0))
    gl.store(k_cache + to + HALF, high, mask=(r == G) & (d >= 0))
    gl.store(v_cache + to, low, mask=(r == G + 1) & (d >= 0))
    gl.store(v_cache + to + HALF, high, mask=(r == G + 1) & (d >= 0))


@gluon.jit
def whole_heads(low, high, D: gl.constexpr):
    """[8, D] of its halves."""
    return gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (ROWS, D))
