"""Large memory that compiled CPU code uses again: fresh memory costs a page fault for every 4 KiB, more than
most kernels take to fill it.

The arena refers to the storage of each large tensor it made. A call takes one over if nobody else refers to
it any more, be it a tensor, view, array, autograd graph or storage object, and if it is as it was made: not
resized, moved or lent. So what a caller holds is never written to. Nothing here locks: a block that is looked
at is in no list.
Caching allocators do the same for GPUs: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections import deque
from collections.abc import Sequence

import torch

from minicompile import compat
from minicompile.compat import storage_uses
from minicompile.runtime.load import allocator
from minicompile.scheduling.nodes import LARGE

LOOKS = 8
"""How many blocks of a size are looked at before a new one is made."""

HUGE = 4 << 20
"""Bytes from which on new memory asks for huge pages: fewer faults, and fewer misses of the TLB."""


class ArenaBlock:
    """A storage and how it looks while only the arena refers to it."""

    __slots__ = ("address", "pointer", "references", "size", "storage")

    def __init__(self, size: int) -> None:
        self.storage = torch.UntypedStorage(size, device="cpu")
        self.size, self.address = size, self.storage.data_ptr()
        self.pointer = compat.storage_pointer(self.storage)
        self.references = sys.getrefcount(self.storage)
        if size >= HUGE:
            ask_for_huge_pages(self.address, size)

    def free(self) -> bool:
        """Whether nobody else refers to it, in C++ or in Python. Another thread may turn one reference into
        the other meanwhile: so the first is counted twice."""
        return (
            storage_uses(self.pointer) == 1
            and sys.getrefcount(self.storage) == self.references
            and storage_uses(self.pointer) == 1
        )

    def intact(self) -> bool:
        """Whether it is as it was made. (What NumPy has seen can't be resized any more.)"""
        storage = self.storage
        here = storage.data_ptr() == self.address and storage.nbytes() == self.size
        return here and storage.resizable()


class Arena:
    """The blocks, by their bytes. The last in use come last and are taken first: caches still have them."""

    def __init__(self) -> None:
        self.blocks: dict[int, deque[ArenaBlock]] = {}

    def empty(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, limit: int
    ) -> torch.Tensor:
        """A tensor with memory of its own, uninitialised. `limit`: most bytes that are kept."""
        span = bytes_from_first_to_last(size, stride, dtype)
        if span < LARGE or span > limit:
            return compat.empty_strided_cpu(size, stride, dtype)
        block = self.take(span)
        if block is None:
            self.shrink(limit - span)
            block = ArenaBlock(span)
            self.blocks[span] = self.blocks.pop(span, deque())
        # a view of no other tensor
        made = compat.empty_strided_cpu((0,), (1,), dtype).set_(block.storage, 0, size, stride)
        if (blocks := self.blocks.get(span)) is not None:
            blocks.append(block)  # no longer free: nobody takes it
        return made

    def take(self, size: int) -> ArenaBlock | None:
        """A block that is free. Those that a user of them has changed are forgotten."""
        blocks = self.blocks.get(size) or deque()
        for _ in range(min(len(blocks), LOOKS)):
            try:
                block = blocks.pop()
            except IndexError:  # other threads took them
                break
            if not block.free():
                blocks.appendleft(block)
            elif block.intact():
                return block
        return None

    def shrink(self, limit: int) -> None:
        """Forget blocks until they have at most `limit` bytes, first of sizes not made for long."""
        held = self.bytes()
        for size, blocks in list(self.blocks.items()):
            while held > limit:
                try:
                    blocks.popleft()
                except IndexError:
                    self.blocks.pop(size, None)
                    break
                held -= size

    def clear(self) -> None:
        """Forget all blocks; what is in use lives on with those who use it."""
        self.blocks = {}

    def bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in list(self.blocks.items()))


@functools.lru_cache(1024)
def bytes_from_first_to_last(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    last = sum((n - 1) * step for n, step in zip(size, stride))
    return 0 if 0 in size else (last + 1) * dtype.itemsize


def ask_for_huge_pages(address: int, size: int) -> None:
    """Where the system gives them on demand."""
    advice, call = getattr(mmap, "MADV_HUGEPAGE", None), getattr(ctypes.CDLL(None), "madvise", None)
    if advice is None or call is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    call(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), advice)


ARENA = allocator("arena")(Arena())
"""One for all graphs: memory that one has done with serves the next."""
