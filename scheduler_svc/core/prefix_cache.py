"""Full blocks by content: a chain of digests over tagged tokens, so that equal prefixes find equal blocks.

Knows digests and block ids; does not know who runs. A block enters only when the step that filled it is acknowledged.
Invariant: a digest names at most one block, and an indexed block exactly one digest.

The digest is blake2b-128 over the parent's digest and the block's tokens; the root is over tagged fields (weights,
salt), so that neither tenants nor weights can be confused. A collision is as unlikely as for any 128-bit hash.
"""

import hashlib
from collections.abc import Sequence as Items
from functools import lru_cache

import numpy as np

from protos.step import Int32s
from scheduler_svc.core.blocks import BlockPool

DIGEST_BYTES = 16


@lru_cache(maxsize=1024)
def root_digest(model_version: str, cache_salt: str, adapter: str = "") -> bytes:
    """The parent of a first block: every field with its name and length, so that no two splits agree."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, value in (("weights", model_version), ("salt", cache_salt), ("adapter", adapter)):
        data = value.encode()
        state.update(f"{name}:{len(data)}:".encode() + data)
    return state.digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: Int32s, block_size: int, num_blocks: int) -> None:
    """Append digests until `chain` covers the first `num_blocks` full blocks of `tokens`."""
    first = len(chain)
    if num_blocks <= first:
        return
    data = np.ascontiguousarray(tokens[first * block_size : num_blocks * block_size], "<i4").tobytes()
    parent, stride = chain[-1] if chain else root, 4 * block_size
    for start in range(0, len(data), stride):
        parent = hashlib.blake2b(parent + data[start : start + stride], digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


class PrefixIndex:
    """Which block holds which content, and which content is being computed right now."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, self._forget)
        self.blocks: dict[bytes, int] = {}
        self.digests: list[bytes | None] = [None] * num_blocks  # by block
        self.pending: dict[bytes, int] = {}  # digest -> serial of the row that computes it

    def match(self, chain: Items[bytes], limit: int) -> list[int]:
        """Blocks of the longest prefix of chain[:limit] that is indexed."""
        found: list[int] = []
        for digest in chain[:limit]:
            block = self.blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, digest: bytes, block: int) -> None:
        """The block holds this content, acknowledged. An equal block that is already known stays the one."""
        if digest not in self.blocks:
            self.blocks[digest] = block
            self.digests[block] = digest
            self.pool.index(block)

    def remove(self, block: int) -> None:
        """The block's content cannot be trusted, or is gone."""
        if self.digests[block] is not None:
            self._forget(block)
            self.pool.unindex(block)

    def clear(self) -> None:
        """Every content is gone: the workers' caches are."""
        for block in list(self.blocks.values()):
            self.remove(block)

    def _forget(self, block: int) -> None:
        digest = self.digests[block]
        assert digest is not None, f"block {block} is not indexed"
        del self.blocks[digest]
        self.digests[block] = None
