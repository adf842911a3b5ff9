"""Equal runs of a file's bytes, one stride apart, into memory without a gap: a shard's part of every row of a matrix.

Knows `pread`. Does not know tensors. A run may be as short as a few elements, and the interpreter takes longer over a
call than the kernel over its bytes, so the loop is machine code where numba's LLVM is at hand; what it leaves, and
where it is absent everything, is read from Python, which also knows interrupted and short reads.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LOOP = """
declare i64 @pread(i32, ptr, i64, i64)

define void @read_runs(i32 %file, i64 %offset, i64 %stride, i64 %count, i64 %repeats, ptr %into, ptr %done) {
entry:
  br label %next
next:
  %run = phi i64 [ 0, %entry ], [ %after, %whole ]
  %left = icmp slt i64 %run, %repeats
  br i1 %left, label %read, label %end
read:
  %skipped = mul i64 %run, %stride
  %from = add i64 %offset, %skipped
  %filled = mul i64 %run, %count
  %to = getelementptr i8, ptr %into, i64 %filled
  %got = call i64 @pread(i32 %file, ptr %to, i64 %count, i64 %from)
  %all = icmp eq i64 %got, %count
  br i1 %all, label %whole, label %end
whole:
  %after = add i64 %run, 1
  br label %next
end:
  store i64 %run, ptr %done
  ret void
}
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
    word = ctypes.c_int64
    kinds = (ctypes.c_int32, word, word, word, word, ctypes.c_void_p, ctypes.c_void_p)
    function = assemble(_LOOP, ["read_runs"], ["pread"]).function("read_runs", *kinds)

    def loop(descriptor: int, runs: Runs, into: memoryview) -> int:
        done = word()
        start = ctypes.addressof(ctypes.c_byte.from_buffer(into))
        function(descriptor, runs.offset, runs.stride, runs.count, runs.repeats, start, ctypes.addressof(done))
        return done.value

    return loop
