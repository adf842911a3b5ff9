"""Equal runs of a file's bytes, one stride apart, into memory without a gap: a shard's part of every row of a matrix.

Knows `preadv`. Does not know tensors. A run may be as short as a few elements: then a call costs more than its bytes,
so runs that lie close together are read by one call, which drops what lies between them into a buffer that stays in
the cache. The loop is machine code where numba's LLVM is at hand; what it leaves, and where it is absent everything, is
read from Python, which also knows interrupted and short reads.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

GAP_BYTES = 8 << 10  # runs no farther apart are read together
TOGETHER = 512  # of them at a time: with the gaps, as many places as the kernel takes (IOV_MAX)

_LOOP = f"""
declare i64 @preadv(i32, ptr, i32, i64)

define void @read_runs(i32 %file, i64 %offset, i64 %stride, i64 %count, i64 %repeats, i64 %together,
                       ptr %into, ptr %dropped, ptr %done) {{
entry:
  %places = alloca [{2 * TOGETHER} x {{ ptr, i64 }}]
  %gap = sub i64 %stride, %count
  br label %next
next:
  %run = phi i64 [ 0, %entry ], [ %after, %call ]
  %left = sub i64 %repeats, %run
  %some = icmp sgt i64 %left, 0
  br i1 %some, label %begin, label %end
begin:
  %few = icmp slt i64 %left, %together
  %n = select i1 %few, i64 %left, i64 %together
  br label %lay
lay:
  %i = phi i64 [ 0, %begin ], [ %i1, %lay ]
  %i1 = add i64 %i, 1
  %number = add i64 %run, %i
  %filled = mul i64 %number, %count
  %to = getelementptr i8, ptr %into, i64 %filled
  %even = shl i64 %i, 1
  %odd = or i64 %even, 1
  %kept = getelementptr {{ ptr, i64 }}, ptr %places, i64 %even
  %kept.size = getelementptr i8, ptr %kept, i64 8
  %between = getelementptr {{ ptr, i64 }}, ptr %places, i64 %odd
  %between.size = getelementptr i8, ptr %between, i64 8
  store ptr %to, ptr %kept
  store i64 %count, ptr %kept.size
  store ptr %dropped, ptr %between
  store i64 %gap, ptr %between.size
  %laid = icmp eq i64 %i1, %n
  br i1 %laid, label %call, label %lay
call:
  %twice = shl i64 %n, 1
  %one.less = sub i64 %twice, 1
  %number.of.places = trunc i64 %one.less to i32
  %skipped = mul i64 %run, %stride
  %from = add i64 %offset, %skipped
  %got = call i64 @preadv(i32 %file, ptr %places, i32 %number.of.places, i64 %from)
  %got.and.gap = add i64 %got, %gap
  %whole = sdiv i64 %got.and.gap, %stride
  %after = add i64 %run, %whole
  %all = icmp eq i64 %whole, %n
  br i1 %all, label %next, label %end
end:
  %finished = phi i64 [ %run, %next ], [ %after, %call ]
  store i64 %finished, ptr %done
  ret void
}}
"""


class Ended(Exception):
    """The file has fewer bytes than it had."""


@dataclass(frozen=True, slots=True)
class Runs:
    """`repeats` runs of `count` bytes, the first at `offset`, each `stride` bytes after the one before."""

    offset: int
    count: int
    stride: int = 0
    repeats: int = 1

    @property
    def size(self) -> int:
        return self.count * self.repeats

    def pieces(self, most: int) -> Iterator["Runs"]:
        """The same bytes in the same order, at most `most` at a time: several whole runs, or a part of one."""
        if self.count > most:
            for run in range(self.repeats):
                for begin in range(0, self.count, most):
                    yield Runs(self.offset + run * self.stride + begin, min(most, self.count - begin))
            return
        together = most // self.count
        for first in range(0, self.repeats, together):
            offset = self.offset + first * self.stride
            yield Runs(offset, self.count, self.stride, min(together, self.repeats - first))


def read(descriptor: int, runs: Runs, into: memoryview) -> None:
    """Fill `into`, of `runs.size` bytes. Other threads run meanwhile. Raises Ended, OSError."""
    loop = _compiled()
    done = 0 if loop is None else loop(descriptor, runs, into)
    for run in range(done, runs.repeats):
        place, offset = into[run * runs.count : (run + 1) * runs.count], runs.offset + run * runs.stride
        got = 0
        while got < runs.count:
            more = os.preadv(descriptor, (place[got:],), offset + got)
            if more == 0:
                raise Ended
            got += more


@functools.cache
def _compiled() -> Callable[[int, Runs, memoryview], int] | None:
    """Reads runs up to the first that does not come whole, and says how many did."""
    try:
        from worker_svc.ops.native import assemble
    except ImportError:
        return None
    word, address = ctypes.c_int64, ctypes.c_void_p
    kinds = (ctypes.c_int32, word, word, word, word, word, address, address, address)
    function = assemble(_LOOP, ["read_runs"], ["preadv"]).function("read_runs", *kinds)

    def loop(descriptor: int, runs: Runs, into: memoryview) -> int:
        stride, done, dropped = max(runs.stride, runs.count), word(), ctypes.create_string_buffer(GAP_BYTES)
        together = TOGETHER if stride - runs.count <= GAP_BYTES else 1
        start = ctypes.addressof(ctypes.c_byte.from_buffer(into))
        where = start, ctypes.addressof(dropped), ctypes.addressof(done)
        function(descriptor, runs.offset, stride, runs.count, runs.repeats, together, *where)
        return done.value

    return loop
