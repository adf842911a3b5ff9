"""The paged key/value cache of one rank: K and V apart, [blocks, kv_heads, block, head_dim] a layer, zeroed.

Knows shapes and bytes. Does not know which sequence owns a block. One block more than asked for is the *null block*:
nobody writes it, so what pads a block table reads zeros.
Invariant: keys and values past a sequence's last token in its last block are zeros of its own, since a block is zeroed
when its first position is written (`Ops.qkv_rope_write`); what an earlier owner left, NaN included, reaches nobody.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.spec import ModelSpec, Shard


@dataclass(frozen=True, slots=True)
class LayerCache:
    keys: Tensor  # [blocks + 1, K, block, E]
    values: Tensor


class KVCache:
    """Args:
    shard: whose kv heads.
    num_blocks: usable blocks; the null block comes on top.
    dtype: of keys and values; they are dequantised on read when it is not the model's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int = 16,
        *,
        dtype: torch.dtype,
        shard: Shard | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.num_kv_heads = len((shard or Shard()).kv_heads(spec.num_kv_heads))
        shape = (spec.num_layers, 2, num_blocks + 1, self.num_kv_heads, block_size, spec.head_dim)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(LayerCache(layer[0], layer[1]) for layer in self._storage)

    @property
    def null_block(self) -> int:
        return self.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the usable blocks."""
        return self._storage[:, :, : self.num_blocks].numel() * self._storage.element_size()


def kv_bytes_per_token(spec: ModelSpec, shard: Shard, item_bytes: int) -> int:
    """Bytes that one token takes on one rank."""
    return 2 * spec.num_layers * len(shard.kv_heads(spec.num_kv_heads)) * spec.head_dim * item_bytes


def blocks_in(memory_bytes: int, spec: ModelSpec, shard: Shard, item_bytes: int, block_size: int) -> int:
    """Usable blocks that fit in so many bytes."""
    return max(0, memory_bytes // (kv_bytes_per_token(spec, shard, item_bytes) * block_size) - 1)
