"""Small programs: shapes, in-place operators and views, values read back."""

# ruff: noqa
# mypy: ignore-errors
import functools
import math

import numpy as np
import torch
from torch.nn import functional as F

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)
ints = torch.tensor([[3, -2], [0, 7]])


# -- shapes


@program(x)
def size_arithmetic(a):
    rows, columns = a.shape
    flat = a.shape.numel()
    longer = a.shape + (1,)
    return a.reshape(longer), a.view(a.shape[:-1] + (2, -1)), flat // rows, longer[-1], columns * 2


@program(x)
def size_as_value(a):
    return (
        a.shape,
        a.size(),
        tuple(a.shape),
        list(a.shape),
        torch.Size([1]) + a.shape,
        a.shape == (3, 4),
    )


@program(x)
def size_methods(a):
    return (
        a.shape.index(4),
        a.shape.count(3),
        math.prod(a.shape),
        max(a.shape),
        a.shape[::-1],
        len(a.shape),
    )


@program(x)
def branch_on_size(a):
    if a.size(0) % 2 and a.numel() > 10:
        return a[: a.size(0) // 2]
    return a.repeat(2, 1)


@program(x)
def shapes_into_factories(a):
    made = torch.zeros(a.shape[0] + 1, *a.shape[1:], dtype=a.dtype)
    return torch.cat([a, made]), a.new_full((a.dim(),), a.shape[1]), torch.arange(a.shape[0])


@program(x)
def unpacking_a_tensor(a):
    first, *rest = a
    (p, q), r = a[:2], a[0, :3]
    return first + p, q, len(rest), r


@program(x)
def broadcasting_and_none(a):
    return a[:, None] - a[None], a[..., None].shape, a[:, [0, -1]], a[a.shape[0] - 1 :, ::2]


@program(x)
def meshes_and_einsum(a):
    grid = torch.meshgrid(torch.arange(a.shape[0]), torch.arange(2), indexing="ij")
    return grid, torch.einsum("ij,kj->ik", a, a), torch.tensordot(a, a, dims=([1], [1]))


@program(x)
def split_chunk_unbind(a):
    left, right = a.split([1, 3], dim=1)
    return (
        left,
        right.chunk(2, 1),
        a.unbind(1)[0],
        torch.vstack([left, left]),
        torch.block_diag(left, left),
    )


@program(torch.zeros(0, 4))
def empty_rows(a):
    return a.sum(0), a + 1, torch.cat([a, a]), [r for r in a], a.shape[0] or "none"


@program(torch.tensor(2.5))
def zero_dimensional(a):
    return a * 2, a.reshape(1), a.shape, a.dim(), a.expand(3)


@program(torch.randn(4, 3).T)
def transposed_input(a):
    return a * 2, a.is_contiguous(), a.contiguous(), a.stride(), a.reshape(-1)


@program(x, again=(x.double(),))
def another_dtype(a):
    return a * 2, a.dtype, torch.finfo(a.dtype).eps, a.to(torch.float16).dtype.itemsize


@program(x, again=(x.T,))
def another_layout(a):
    return a.view(-1) if a.is_contiguous() else a.reshape(-1) * 2


@program(x, again=(x.clone().requires_grad_(),))
def requires_grad_is_a_guard(a):
    return a * 2 if a.requires_grad else a * 3


# -- in-place operators, views, aliases


@program(x.clone())
def in_place_on_an_input(a):
    a += 1
    a[0] *= 2
    a.clamp_(max=3)
    return a, a.sum()


@program(x.clone())
def writes_through_views(a):
    row, column = a[0], a.T[1]
    row.zero_()
    column += 5
    a.view(-1)[2:4] = 9
    a.diagonal().fill_(1)
    return row, a + 1


base = torch.zeros(3, 4)


@program(base[0], base, whole=False)
def inputs_share_memory(row, whole):
    row += 1
    return whole * 2, row


@program(base, base)
def one_tensor_given_twice(p, q):
    p.add_(1)
    return q * 2, p is q


@program(x)
def returns_views_of_the_input(a):
    return a, a[0], a.view(-1), a.T, [a[1:], a.detach()]


@program(x)
def in_place_on_intermediates(a):
    b = a * 2
    c = b[0]
    b.add_(1)
    c.mul_(3)
    return b, c


@program(x.clone())
def masks_and_indexed_writes(a):
    a[a > 0] = 0
    a[:, torch.tensor([0, 2])] = -1
    a.masked_fill_(a == -1, 5)
    a.index_add_(0, torch.tensor([0]), torch.ones(1, 4))
    return a.where(a > 0, -a)


@program(x, whole=False)
def out_argument(a):
    made = torch.empty(a.shape)
    same = torch.add(a, 1, out=made)
    return made, same is made


@program(x.clone(), y)
def copy_and_swap(a, b):
    kept = a.clone()
    a.copy_(b)
    return kept, a + b


@program(torch.zeros(1), x)
def accumulates_into_an_input(total, a):
    for row in a:
        total += row.sum()
    return total.norm()


@program(x.clone(), whole=False)
def data_attribute(a):
    a.data.mul_(2)
    a.data = a.data + 1
    return a * 3


@program(x.clone(), whole=False)
def resized_in_place(a):
    a.unsqueeze_(0)
    return a.shape, a + 1


state = {"t": torch.zeros(4), "n": 0}


@program(x, change="state['t'] = torch.ones(4)")
def state_in_a_global_dict(a):
    state["t"].add_(a.sum(0))
    state["n"] += 1
    state["last"] = state["t"] * state["n"]
    return a - state["t"]


# -- values read back


@program(x, whole=False)
def item(a):
    return a.sum().item() > 0, a * 2


@program(x, whole=False)
def branch_on_data(a):
    b = a * 2
    if b.sum() > 0:
        return b + 1
    return b - 1


@program(torch.tensor(3), x, whole=False)
def item_as_size(n, a):
    return torch.ones(int(n)), a[: n.item()]


@program(x, whole=False)
def tolist_and_format(a):
    return a[0].tolist(), f"{a[0, 0]:.3f}", len(str(a)) > 5


@program(x, whole=False)
def loop_until_converged(a):
    steps = 0
    while a.abs().max() > 0.5:
        a = a / 2
        steps += 1
    return a, steps


@program(x, whole=False)
def nonzero_and_masks(a):
    return a[a > 0], torch.nonzero(a > 0), (a > 0).any()


@program(x, whole=False)
def equality_of_tensors(a):
    return torch.equal(a, a), torch.allclose(a, a + 1e-9), bool((a == a).all())


@program(x, whole=False)
def numpy_there_and_back(a):
    n = a.numpy()
    return torch.from_numpy(n * 2) + a, n.shape, float(np.mean(n)) == float(n.mean())


@program(x, whole=False)
def numpy_scalars_and_arrays(a):
    k = np.float32(2.5)
    return a * float(k), np.arange(3) + 1, int(np.int64(3)) + a.shape[0]


@program(x, np.ones(4, dtype=np.float32), whole=False)
def numpy_array_as_argument(a, array):
    return a + torch.as_tensor(array), array.sum()


@program(x)
def tensors_from_python_values(a):
    rows = [[1, 2], [3, a.shape[0]]]
    return torch.tensor(rows), torch.as_tensor(2.5), torch.tensor([a.shape[1]] * 2) + 1


@program(ints, 3, again=(ints, -3))
def integer_tensor_arithmetic(a, n):
    return a // n, a % n, a / n, -a // 2, a >> 1, a & 3, ~a, a**2, torch.fmod(a, n)


@program(ints)
def type_promotion(a):
    return (
        a * 1.5,
        a + True,
        a > 0,
        (a > 0) + 1,
        a.to(torch.uint8) * 2,
        a / 2,
        a.float() + a.double(),
    )


@program(x)
def random_tensors(a):
    noise = torch.randn_like(a)
    return a + noise * F.dropout(a, 0.5), torch.randint(0, 9, (2,)), torch.randperm(4)


@program(x, whole=False)
def generator_object(a):
    g = torch.Generator().manual_seed(3)
    return a + torch.rand(4, generator=g)


@program(x, whole=False)
def tensors_in_conditions(a):
    return a is None, a is not None, isinstance(a, torch.nn.Parameter), a.is_cuda, a.grad is None


@program(x)
def methods_by_class(a):
    return (
        torch.Tensor.add(a, 1),
        torch.Tensor.sum(a, 0),
        list(map(torch.Tensor.relu, [a])),
        a.__add__(2),
    )


@program(x, "cos", again=(x, "sin"))
def torch_function_by_name(a, name):
    return getattr(torch, name)(a), getattr(F, "relu")(a), getattr(a, name)()


@program(x)
def partial_of_torch_functions(a):
    steps = [torch.neg, functools.partial(torch.mul, other=2), F.softplus, torch.nn.ReLU()]
    return functools.reduce(lambda t, f: f(t), steps, a)


@program(x, whole=False)
def caught_errors_of_operators(a):
    seen = []
    for f in (
        lambda: a.view(5, 5),
        lambda: a + torch.ones(7),
        lambda: torch.cat([]),
        lambda: a.sum(9),
    ):
        try:
            f()
        except (RuntimeError, IndexError, ValueError) as error:
            seen.append(type(error).__name__)
    return seen, a


@program(x)
def methods_of_tensors(a):
    return (
        a.T,
        a.mT.shape,
        a.size(),
        a.size(-1),
        a.numel(),
        a.dim(),
        a.is_contiguous(),
        a.stride(),
        a.dtype.is_floating_point,
        a.device.type,
        a.to(torch.float64),
        a.type_as(a),
        a.view(-1),
        a.reshape(2, -1),
        a.permute(1, 0),
        a.chunk(2, 1),
        a.split([1, a.shape[0] - 1]),
        a.max(dim=1),
        a.max(dim=1).values,
        a.sort(),
        a.unbind(0),
        a.is_floating_point(),
        a.element_size(),
        a.new_zeros(2),
        a.expand(2, *a.shape),
        a.unsqueeze(0).squeeze(0),
        torch.is_tensor(a),
    )


@program(x)
def new_tensors(a):
    return (
        torch.arange(5),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([1.0, 2.0]),
        torch.ones_like(a),
        torch.full((2,), 3.0),
        torch.eye(3),
        torch.linspace(0, 1, 4),
        torch.empty(0),
        torch.tensor(3),
    )


@program(x)
def functions_of_nn(a):
    F = torch.nn.functional
    return (
        F.relu(a),
        F.softmax(a, -1),
        F.layer_norm(a, (4,)),
        F.gelu(a),
        F.pad(a, (1, 1)),
        F.linear(a, a),
        F.cross_entropy(a, torch.arange(a.shape[0]) % 4),
        F.one_hot(torch.tensor([0, 1, 2]), 3),
        torch.einsum("ij,kj->ik", a, a),
        F.dropout(a, 0.5, False),
    )


@program(x)
def operators_of_tensors(a):
    return (
        a @ a.T,
        -a,
        ~torch.tensor([True]),
        a**2,
        a // 2,
        a % 2,
        2 - a,
        2 / a.abs(),
        a > 0,
        a == a,
        (a > 0) & (a < 1),
        1 < a,
        a != a,
        2**a,
        a is None,
        a is not a,
    )


# -- less common ways to say common things


layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))


@program(x)
def layers_in_reverse(a):
    for layer in reversed(layers):
        a = layer(a)
    return a


@program(x, again=(x.log(),), whole=False)
def raises_where_data_is_bad(a):
    if a.isnan().any():
        raise ValueError("not a number")
    return a * 2
