"""A tensor-parallel group within one host, over memory that its ranks share: no library adds or moves anything.

Knows which kernel of `collective_kernels.py` a collective is and how it is cut to fit a slot. Does not know layers.
Invariant: sums are `leaves.fold`'s at every size, and every launch is captured as it is, so a graph may be replayed.

A group whose peer is gone does not hang the device: waits end when the host aborts, or after the step's timeout, and
`check` says so afterwards. Ranks may share a device: their kernels take turns then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.cuda import collective_kernels as kernels
from worker_svc.cuda.peer_memory import PeerMemory
from worker_svc.ops.leaves import LeafPart
from worker_svc.parallel.group import GroupLost

SLOT_BYTES = 32 << 20  # what one launch moves a rank, at most
PROGRAMS = 64  # of every launch
TWICE_FROM = 1 << 18  # elements from which a sum is cheaper in two exchanges
BLOCKS = ((1 << 16, 512), (1 << 19, 1024))  # (elements below, of a program's step); 4096 above
WARPS = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """How collectives are cut, which no bit depends on."""

    slot_bytes: int = SLOT_BYTES
    twice_from: int = TWICE_FROM
    programs: int = PROGRAMS

    @property
    def region_bytes(self) -> int:
        """What a group needs of every rank's memory."""
        return kernels.pad_bytes(self.programs) + 2 * self.slot_bytes


CUT = Cut()


class SymmetricGroup:
    """Args:
    memory: `cut.region_bytes` on every rank, zero, in use by this group alone.
    device: this rank's. limit_s: how long a wait on the device may take.
    """

    def __init__(
        self, memory: PeerMemory, rank: int, tp: int, device: torch.device, limit_s: float, cut: Cut = CUT
    ) -> None:
        assert tp <= kernels.RANKS, f"{tp} ranks; pads are for {kernels.RANKS}"
        self.rank = rank
        self.tp = tp
        self._memory = memory  # given back when this group is forgotten
        self._on_gpu = device.type == "cuda"
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=self._on_gpu)
        self._table = torch.tensor([*memory.addresses, self._words.data_ptr()], dtype=torch.int64, device=device)
        self._state = torch.zeros(cut.programs + 1, dtype=torch.int32, device=device)
        self._limit_ns = int(limit_s * 1e9)
        self._cut = cut

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((self.tp, *x.shape), dtype=x.dtype, device=x.device)
        words = _words(x.view(-1))
        moved = out.view(-1).view(words.dtype)
        most = self._cut.slot_bytes // words.element_size()
        for start in range(0, len(words), most):
            part = words[start : start + most]
            kernels.gather_kernel[(self._cut.programs,)](
                part, moved[start:], self._table, self._state, len(part), len(words), self._cut.slot_bytes,
                self._limit_ns, BLOCK=_block(len(part)), **self._options(),
            )  # fmt: skip
        return out

    def sum_leaves(self, leaves: Tensor, part: LeafPart, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The fold of all ranks' leaves (+ bias), rounded once to `dtype`, on every rank.

        leaves: this rank's, [C, ..., N] fp32, C those of `part` or their sum alone. bias: [N].
        """
        assert leaves.dtype == torch.float32 and leaves.is_contiguous()
        own, shape = len(leaves), leaves.shape[1:]
        node = part.is_node or own == 1
        assert node or own == part.count
        out = torch.empty(shape, dtype=dtype, device=leaves.device)
        flat, flat_out = leaves.view(own, -1), out.view(-1)
        total, width, each = flat.shape[1], shape[-1], 1 if node else own
        most = max(1, self._cut.slot_bytes // (4 * each) // width) * width  # whole rows, for the bias
        assert 4 * each * most <= self._cut.slot_bytes, (width, each)
        for start in range(0, total, most):
            count = min(most, total - start)
            kernels.sum_kernel[(self._cut.programs,)](
                flat[:, start:], flat_out[start:], flat if bias is None else bias, self._table, self._state, count,
                total, width, self._cut.slot_bytes, self._limit_ns, OWN=own, EACH=each, BIASED=bias is not None,
                TWICE=count >= self._cut.twice_from, BLOCK=_block(count), **self._options(),
            )  # fmt: skip
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum in rank order's tree; the library's order that `fast` allows is this one here."""
        part = LeafPart(self.rank, 1, self.tp)
        return self.sum_leaves(x.float().contiguous().unsqueeze(0), part, x.dtype)

    def barrier(self) -> None:
        self.all_gather(self._state[:1])
        self._finish()
        self.check()

    def check(self) -> None:
        """Raises GroupLost where a collective that has ended did so without its peers."""
        aborted, late = self._words.tolist()
        if aborted or late:
            raise GroupLost("the group was aborted" if aborted else "a peer did not come within the step timeout")

    def abort(self) -> None:
        self._words[0] = 1

    def close(self) -> None:
        self.abort()

    def _options(self) -> dict[str, int | bool]:
        return {
            "RANK": self.rank, "TP": self.tp, "PROGRAMS": self._cut.programs, "RANKS": kernels.RANKS,
            "ASK_EVERY": kernels.ASK_HOST_EVERY, "TIMED": self._on_gpu, "DEPENDENT": False, "num_warps": WARPS,
        }  # fmt: skip

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()


def _words(flat: Tensor) -> Tensor:
    """The same bytes in the largest words that they fill."""
    size = flat.numel() * flat.element_size()
    return flat.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8)


def _block(elements: int) -> int:
    return next((block for below, block in BLOCKS if elements < below), 4096)
