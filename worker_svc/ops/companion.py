"""Threads that help with a step's loops: chunks of one job, taken by whoever is free.

Knows how helpers are woken, how a chunk is claimed and when a job is done. Does not know what a job computes; a job
must give the same result whoever takes which chunk. Python's own pool costs 20 to 50 us a job, of which a decode step
has hundreds; here a helper that is awake takes a chunk within a microsecond, without the interpreter's lock.

    remaining   chunks that nobody has claimed. Claiming is one atomic subtraction; what it returns says whether a chunk
                was got, and which. A claimed chunk keeps its job from ending, so its function and arguments stand.
    pending     chunks not yet finished; the caller returns when there are none.
    sleepers    helpers in (or on their way to) the semaphore; a new job wakes them.

A helper that finds nothing spins for about 50 us, then gives way to others for as long again, then sleeps. So nothing
spins between steps, and nothing has to be told that a step has ended, well or badly. The caller never waits for a
helper to come: it takes chunks itself until none is left.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable

import numpy as np

from worker_svc.ops.native import NativeCode, assemble

SPINS, YIELDS = 2_000, 200
WAIT_SPINS = 20_000  # of the caller, before it gives way too: a helper may have been put off its core
REMAINING, PENDING, JOB, ARGUMENTS, SLEEPERS, SEMAPHORE, SIZE = 0, 128, 256, 264, 384, 512, 640

_PAUSES = {  # what tells the core that it spins: declaration and call
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def _text() -> str:
    declaration, pause = _PAUSES.get(os.uname().machine, ("", ""))
    fields = {"rem": REMAINING, "pen": PENDING, "job": JOB, "arg": ARGUMENTS, "slp": SLEEPERS}

    def places(*names: str) -> str:
        return "\n".join(f"  %{n} = getelementptr i8, ptr %s, i64 {fields[n]}" for n in names)

    return f"""
{declaration}
declare i32 @sem_wait(ptr)
declare i32 @sem_post(ptr)
declare i32 @sched_yield()

define void @run(ptr %s, i64 %function, i64 %arguments, i64 %chunks) {{
entry:
{places("rem", "pen", "job", "arg", "slp")}
  %sem = getelementptr i8, ptr %s, i64 {SEMAPHORE}
  store i64 %function, ptr %job
  store i64 %arguments, ptr %arg
  store atomic i64 %chunks, ptr %pen release, align 8
  store atomic i64 %chunks, ptr %rem seq_cst, align 8
  %asleep = atomicrmw xchg ptr %slp, i64 0 seq_cst
  %f = inttoptr i64 %function to ptr
  br label %wake
wake:
  %n = phi i64 [ %asleep, %entry ], [ %n1, %post ]
  %awake = icmp sle i64 %n, 0
  br i1 %awake, label %claim, label %post
post:
  %p = call i32 @sem_post(ptr %sem)
  %n1 = sub i64 %n, 1
  br label %wake
claim:
  %left = atomicrmw sub ptr %rem, i64 1 acq_rel
  %got = icmp sgt i64 %left, 0
  br i1 %got, label %work, label %wait
work:
  %chunk = sub i64 %left, 1
  call void %f(i64 %arguments, i64 %chunk)
  %d = atomicrmw sub ptr %pen, i64 1 acq_rel
  br label %claim
wait:
  %c = phi i64 [ 0, %claim ], [ %c1, %pause ], [ %c1, %yield ]
  %open = load atomic i64, ptr %pen acquire, align 8
  %done = icmp eq i64 %open, 0
  br i1 %done, label %end, label %idle
idle:
  %c1 = add i64 %c, 1
  %patient = icmp ult i64 %c, {WAIT_SPINS}
  br i1 %patient, label %pause, label %yield
pause:
  {pause}
  br label %wait
yield:
  %y = call i32 @sched_yield()
  br label %wait
end:
  ret void
}}

define void @run_alone(i64 %function, i64 %arguments, i64 %chunks) {{
entry:
  %f = inttoptr i64 %function to ptr
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i1, %work ]
  %more = icmp ult i64 %i, %chunks
  br i1 %more, label %work, label %end
work:
  call void %f(i64 %arguments, i64 %i)
  %i1 = add i64 %i, 1
  br label %next
end:
  ret void
}}

define void @help(ptr %s) {{
entry:
{places("rem", "pen", "job", "arg", "slp")}
  %sem = getelementptr i8, ptr %s, i64 {SEMAPHORE}
  br label %look
look:
  %c = phi i64 [ 0, %entry ], [ 0, %work ], [ %c1, %pause ], [ %c1, %yield ], [ 0, %claim ], [ 0, %sleep ]
  %seen = load atomic i64, ptr %rem acquire, align 8
  %some = icmp sgt i64 %seen, 0
  br i1 %some, label %claim, label %tired
claim:
  %left = atomicrmw sub ptr %rem, i64 1 acq_rel
  %got = icmp sgt i64 %left, 0
  br i1 %got, label %work, label %look
work:
  %chunk = sub i64 %left, 1
  %function = load i64, ptr %job
  %arguments = load i64, ptr %arg
  %f = inttoptr i64 %function to ptr
  call void %f(i64 %arguments, i64 %chunk)
  %d = atomicrmw sub ptr %pen, i64 1 acq_rel
  br label %look
tired:
  %c1 = add i64 %c, 1
  %fresh = icmp ult i64 %c, {SPINS}
  br i1 %fresh, label %pause, label %drowsy
pause:
  {pause}
  br label %look
drowsy:
  %up = icmp ult i64 %c, {SPINS + YIELDS}
  br i1 %up, label %yield, label %lie
yield:
  %y = call i32 @sched_yield()
  br label %look
lie:
  %o = atomicrmw add ptr %slp, i64 1 seq_cst
  %again = load atomic i64, ptr %rem seq_cst, align 8
  %late = icmp sgt i64 %again, 0
  br i1 %late, label %claim, label %sleep
sleep:
  %w = call i32 @sem_wait(ptr %sem)
  br label %look
}}
"""


@functools.cache
def _code() -> NativeCode:
    return assemble(_text(), ("run", "run_alone", "help"), ("sem_wait", "sem_post", "sched_yield"))


class Companion:
    """The helpers of one process. They start when first needed and sleep when there is nothing to do."""

    def __init__(self) -> None:
        room = np.zeros(SIZE + 128, np.uint8)
        self._room, self._place = room, room.ctypes.data + -room.ctypes.data % 128
        code, word = _code(), ctypes.c_int64
        self._run: Callable[..., None] = code.function("run", word, word, word, word)
        self._run_alone: Callable[..., None] = code.function("run_alone", word, word, word)
        self._help: Callable[..., None] = code.function("help", word)
        if ctypes.CDLL(None).sem_init(ctypes.c_void_p(self._place + SEMAPHORE), 0, 0):
            raise OSError("no semaphore for the helpers of a step")
        self._helpers: list[threading.Thread] = []
        self._in_use = threading.Lock()

    def run(self, function: int, arguments: int, chunks: int, threads: int) -> None:
        """function(arguments, chunk) for every chunk, on up to `threads` threads. Both are addresses.

        Two callers at once are safe: the second one works alone.
        """
        if chunks > 1 and threads > 1 and self._in_use.acquire(blocking=False):
            try:
                while len(self._helpers) < threads - 1:
                    self._start_helper()
                self._run(self._place, function, arguments, chunks)
            finally:
                self._in_use.release()
        else:
            self._run_alone(function, arguments, chunks)

    def _start_helper(self) -> None:
        # A daemon: it stays in native code, without the interpreter's lock, until the process ends.
        helper = threading.Thread(target=self._help, args=(self._place,), name="companion", daemon=True)
        self._helpers.append(helper)
        helper.start()


_companions: dict[int, Companion] = {}


def companion() -> Companion:
    """This process's. A forked child has its own: threads do not survive a fork."""
    here = os.getpid()
    known = _companions.get(here)
    if known is None:
        known = _companions.setdefault(here, Companion())
    return known
