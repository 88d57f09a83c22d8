"""Large memory on the CPU is used again.

- Never what anybody still holds, however it is held; nor what was changed.
- Its tensors are like any other; what is kept has a limit, and goes with the compiled function.
- Threads and forked processes never get the same memory.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.plugins.memory_arena.arena import ARENA, LOOKS, Arena
from minicompile.scheduling.nodes import LARGE

SIZE = LARGE // 2
"""Elements of the tensors here: 16 MiB."""
LIMIT = 64 * LARGE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ARENA.clear()
    yield
    mc.reset()


def new(arena: Arena, fill: float, limit: int = LIMIT) -> torch.Tensor:
    return arena.empty((SIZE,), (1,), torch.float32, limit).fill_(fill)


def free_blocks(arena: Arena) -> int:
    return sum(block.free() for blocks in arena.blocks.values() for block in blocks)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a view": lambda t: t[5:7],
    "a NumPy array": lambda t: t.numpy(),
    "a DLPack capsule": torch.utils.dlpack.to_dlpack,
    "an untyped storage": lambda t: t.untyped_storage(),
    "a tensor set to its storage": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "a swapped tensor": lambda t: torch.utils.swap_tensors(held := torch.empty(0), t) or held,
    "an autograd graph": lambda t: t.requires_grad_() * t,
    "values of a sparse tensor": lambda t: torch.sparse_coo_tensor(torch.zeros(1, 1).long(), t[:1]),
    "its own cycle": lambda t: setattr(t, "me", t),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_held_memory_is_not_given_away(holder: Callable[[torch.Tensor], Any]) -> None:
    arena = Arena()
    gc.disable()
    try:
        held: list[Any] = [holder(new(arena, 1.0))]
        address = next(iter(arena.blocks[4 * SIZE])).address
        others = [new(arena, 2.0) for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
        assert free_blocks(arena) == 0
        del held[0]
    finally:
        gc.enable()
    gc.collect()
    assert free_blocks(arena) == 1


def test_what_nobody_holds_is_used_again() -> None:
    """Two that take turns need two blocks."""
    arena, held = Arena(), None
    assert len({new(arena, 1.0).data_ptr() for _ in range(5)}) == 1 and arena.bytes() == 4 * SIZE
    addresses = {(held := new(arena, 1.0)).data_ptr() for _ in range(6)}
    assert held is not None and len(addresses) == 2


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "made larger": lambda t: t.resize_(2 * SIZE),
    "emptied": lambda t: t.untyped_storage().resize_(0),
    "shared with other processes": lambda t: t.share_memory_(),
    "seen by NumPy": lambda t: t.numpy(),
    "copied lazily": torch._lazy_clone,
    "moved": lambda t: (
        t.untyped_storage()._swap_data_ptr_(torch.UntypedStorage(4 * SIZE))
        if hasattr(torch.UntypedStorage, "_swap_data_ptr_")
        else t.resize_(2 * SIZE)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_storage_is_forgotten(change: Callable[[torch.Tensor], Any]) -> None:
    arena = Arena()
    made = new(arena, 1.0)
    changed = next(iter(arena.blocks[4 * SIZE]))
    lazily = change(made)
    del made
    if not isinstance(lazily, torch.Tensor) or lazily.untyped_storage() is changed.storage:
        lazily = None  # a reference of its own, which must not be what keeps the block
    fresh = new(arena, 2.0)
    assert all(block is not changed for block in arena.blocks[4 * SIZE])
    assert fresh.untyped_storage().nbytes() == 4 * SIZE and fresh.untyped_storage().resizable()
    assert lazily is None or lazily.max() == 1.0


def test_its_tensors_are_like_any_other() -> None:
    made = ARENA.empty((LARGE, 2), (1, LARGE), torch.float32, LIMIT).fill_(3.0)
    assert made._base is None and made.is_leaf and made.storage_offset() == 0
    assert made.stride() == (1, LARGE) and made.data_ptr() % 64 == 0
    assert torch.equal(pickle.loads(pickle.dumps(made)), made)
    made.t_().resize_(3 * LARGE)
    made.requires_grad_().sum().backward()
    assert made.grad is not None and made.grad.shape == made.shape
    with torch.inference_mode():
        assert ARENA.empty((LARGE,), (1,), torch.float32, LIMIT).is_inference()
    assert not ARENA.empty((SIZE,), (1,), torch.float32, LIMIT).is_inference()


def test_memory_kept_has_a_limit() -> None:
    arena, limit = Arena(), 12 * SIZE
    held = [new(arena, float(number), limit) for number in range(2 * LOOKS)]
    assert arena.bytes() <= limit
    assert [tensor[0].item() for tensor in held] == [float(n) for n in range(2 * LOOKS)]
    for other in (SIZE + 16, SIZE + 32, SIZE + 48, SIZE + 64):
        arena.empty((other,), (1,), torch.float32, limit)
        assert arena.bytes() <= limit
    before = arena.bytes()
    arena.empty((limit,), (1,), torch.float32, limit)  # alone above the limit
    assert arena.bytes() == before
    arena.clear()
    assert arena.bytes() == 0 and held[1].sum() == SIZE


def test_threads_never_get_the_same_memory() -> None:
    arena = Arena()

    def right(mark: float) -> bool:
        held: list[torch.Tensor] = []
        for step in range(60):
            held = [*held[-2:], new(arena, mark + step)]
            if any(
                t[place] != mark + step - n for n, t in enumerate(held[::-1]) for place in (0, -1)
            ):
                return False
            if step % 20 == 19:
                arena.clear()
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, (1000.0, 2000.0, 3000.0, 4000.0)))


def child(queue: Any, compiled: Any, x: torch.Tensor, held: torch.Tensor) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        results = [compiled(x + n) for n in range(3)]
    queue.put((float(held[0, 0]), [float(r[0, 0]) for r in results]))


# Compiled functions -------------------------------------------------------------------------------


def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x.t().contiguous() * 2


def test_outputs_that_are_held_stay_as_they_are() -> None:
    compiled, x = mc.compile(two), torch.zeros(1024, 2048)
    views, arrays, expected = [], [], []
    with torch.no_grad():
        for n in range(6):
            one, other = compiled(x + n)
            views.append(one[3])
            arrays.append(other.numpy())
            expected.append((n + 1.0, 2.0 * n))
    assert [(v[0].item(), a[0, 0]) for v, a in zip(views, arrays, strict=True)] == expected


def test_outputs_that_are_dropped_are_used_again() -> None:
    compiled, x = mc.compile(lambda x: x * 2), torch.ones(1024, 2048)
    with torch.no_grad():
        addresses = {compiled(x).data_ptr() for _ in range(4)}
        assert len(addresses) == 1 and ARENA.bytes() == 8 << 20
        mc.reset()
        assert ARENA.bytes() == 0


@pytest.mark.long
def test_memory_goes_with_the_compiled_function() -> None:
    compiled, x = mc.compile(lambda x: x * 2), torch.ones(1024, 2048)
    with torch.no_grad():
        held = compiled(x)
    assert ARENA.bytes() == 8 << 20
    del compiled
    gc.collect()
    assert ARENA.bytes() == 0 and held.sum() == 4 << 20


@pytest.mark.parametrize("options", [{"arena_bytes": 0}, {"plugins": "none"}], ids=str)
def test_no_arena_if_so_chosen(options: dict[str, Any]) -> None:
    compiled, x = mc.compile(lambda x: x * 2, options=options), torch.ones(1024, 2048)
    with torch.no_grad():
        assert torch.equal(compiled(x), 2 * x)
    assert ARENA.bytes() == 0


@pytest.mark.long
def test_saved_tensors_stay_until_their_backward() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * torch.sigmoid(x)).cumsum(0)

    compiled = mc.compile(f)
    inputs = [torch.full((512, 4096), 0.1 * n, requires_grad=True) for n in range(1, 4)]
    results = [compiled(x) for x in inputs]
    for _ in range(3):
        compiled(inputs[0])  # forgotten at once: its saved tensors are used again
    for x, result in zip(inputs, results, strict=True):
        copied = x.detach().clone().requires_grad_()
        f(copied).sum().backward()
        for _ in range(2):
            x.grad = None
            result.sum().backward(retain_graph=True)
            torch.testing.assert_close(x.grad, copied.grad)
        torch.testing.assert_close(result, f(copied))


def test_an_error_midway_leaves_it_usable() -> None:
    def f(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(0)[index] + 1

    compiled, x = mc.compile(f), torch.ones(1024, 2048)
    right, wrong = torch.arange(1024), torch.full((1024,), 5000)
    with torch.no_grad():
        held = compiled(x, right)
        for _ in range(3):
            with pytest.raises(IndexError):
                compiled(x, wrong)
            torch.testing.assert_close(compiled(x, right), f(x, right))
        torch.testing.assert_close(held, f(x, right))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_forked_process_has_memory_of_its_own() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    try:
        compiled, x = mc.compile(lambda x: x + 1), torch.zeros(1024, 2048)
        with torch.no_grad():
            held = compiled(x + 40)
            compiled(x)  # leaves a free block to both
            context = multiprocessing.get_context("fork")
            queue: Any = context.Queue()
            process = context.Process(target=child, args=(queue, compiled, x, held))
            process.start()
            mine = [compiled(x + 10 * n) for n in range(3)]
            assert queue.get(timeout=60) == (41.0, [1.0, 2.0, 3.0])
            process.join()
        assert held[0, 0] == 41.0 and [m[0, 0].item() for m in mine] == [1.0, 11.0, 21.0]
    finally:
        torch.set_num_threads(threads)
