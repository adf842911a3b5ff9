"""The two ends of a model: embedding and head, split by whole blocks of 1024 ids; a rank may hold none.

Invariant: rows move between ranks, none are added, so the bits are those of one rank. A tied head is one table in
memory, read once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from worker_svc.layers.parameter import Parameter, Slice
from worker_svc.ops.base import Ops, Weight
from worker_svc.parallel.group import Group
from worker_svc.spec import ModelSpec, Shard, vocabulary_part


class Vocabulary:
    def __init__(self, spec: ModelSpec, shard: Shard, embedding: str, head: str) -> None:
        self._spec = spec
        self._names = embedding, head
        self._ids = shard.vocabulary(spec.vocab_size)
        self.parts = tuple(vocabulary_part(spec.vocab_size, rank, shard.tp) for rank in range(shard.tp))
        self._ends = torch.tensor([part.stop for part in self.parts])
        self.table: Tensor
        self.head: Weight = None

    @property
    def first_id(self) -> int:
        return self._ids.start

    def parameters(self) -> Iterator[Parameter]:
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        embedding, head = (Slice(name, shape, self._ids) for name in self._names)
        yield Parameter((embedding,), self._bind_table)
        if not self._spec.tied_head:
            yield Parameter((head,), self._bind_head)

    def _bind_table(self, ops: Ops, table_VD: Tensor) -> None:
        self.table = table_VD
        self._ends = self._ends.to(table_VD.device)
        if self._spec.tied_head:
            self._bind_head(ops, table_VD)

    def _bind_head(self, ops: Ops, weight_VD: Tensor) -> None:
        self.head = ops.prepare_head(weight_VD, self._spec.tied_head)

    def embed(self, ops: Ops, ids_T: Tensor, group: Group) -> Tensor:
        rows = ops.embed(ids_T, self.table, self._ids.start)
        if group.tp == 1:
            return rows
        owner_T = torch.searchsorted(self._ends, ids_T, right=True)
        return group.all_gather(rows)[owner_T, torch.arange(len(ids_T), device=ids_T.device)]

    def local_logits(self, ops: Ops, x_RD: Tensor) -> Tensor:
        """Logits of this rank's ids, [R, local]."""
        return ops.logits(x_RD, self.head)

    def gather(self, local_RL: Tensor, group: Group) -> Tensor:
        """Logits of all ids on every rank, [R, V], from what each rank has of them."""
        if group.tp == 1:
            return local_RL
        widest = max(len(part) for part in self.parts)
        padded = torch.nn.functional.pad(local_RL, (0, widest - local_RL.shape[1]))
        gathered = group.all_gather(padded)
        return torch.cat([rows[:, : len(part)] for rows, part in zip(gathered, self.parts, strict=True)], 1)
