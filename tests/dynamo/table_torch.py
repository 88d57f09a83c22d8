"""Small programs: modules and hooks, modes, autograd."""

# ruff: noqa
# mypy: ignore-errors
import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
w = weight = torch.randn(4, 4, requires_grad=True)


# -- modules and hooks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.scale, self.calls = 2.0, 0

    def forward(self, a, *, twice=False):
        self.calls += 1
        a = self.first(a).relu() * self.scale
        return self.second(a) if twice else a


net = Net()


@program(x, change="net.scale = 3.0")
def module_attribute(a):
    return net(a), net.calls


@program(x, change="net.first.weight.data = net.first.weight.data + 1")
def module_weights_replaced(a):
    return net(a, twice=True)


@program(x, change="net.first = nn.Identity()")
def submodule_replaced(a):
    return net(a)


@program(x, change="net.first = nn.Linear(4, 4, bias=False)")
def submodule_of_the_same_class_replaced(a):
    return net(a)


@program(x, change="net.forward = lambda a: a + 1")
def forward_replaced_on_the_instance(a):
    return net(a)


@program(x, change="Net.forward = lambda self, a: a * self.scale")
def forward_replaced_on_the_class(a):
    return net(a)


@program(x, change="net.first.register_forward_hook(lambda m, args, out: out * 10)")
def forward_hook_is_added(a):
    return net(a)


hooked, trace = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
handle = hooked[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
hooked[1].register_forward_hook(lambda m, args, out: trace.append(out.shape))


@program(x, change="handle.remove()")
def forward_hooks(a):
    return hooked(a), len(trace)


@program(x, change="net.eval()", whole=False)
def hook_registered_in_the_frame(a):
    handle = net.first.register_forward_hook(lambda m, args, out: out + 1)
    result = net(a)
    handle.remove()
    return result, len(net.first._forward_hooks)


every, modes = [], contextlib.ExitStack()


def hook_all():
    every.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: out + 1))
    modes.callback(every[-1].remove)


@program(x, change="hook_all()")
def hooks_on_all_modules(a):
    try:
        return net(a)
    finally:
        while every:
            every.pop().remove()


dropping = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))


@program(x, change="dropping.eval()")
def training_and_eval(a):
    return dropping(a), dropping.training


@program(x, change="dropping[0].p = 0.0")
def dropout_probability(a):
    return dropping[0](a)


@program(x)
def mode_switched_in_the_frame(a):
    dropping.train(False)
    result = dropping(a)
    dropping.train(True)
    return result


@program(x)
def module_buffers(a):
    net.seen += a.sum()
    net.seen = net.seen * 2
    return a + net.seen


@program(x)
def module_walks(a):
    names = [n for n, _ in net.named_parameters()]
    kinds = [type(m).__name__ for m in net.modules()]
    return a * sum(p.numel() for p in net.parameters()), names, kinds, list(net.state_dict())


layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
table = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh()})
pair = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))])


@program(x, change="layers.append(nn.ReLU())")
def module_list(a):
    for layer in layers:
        a = layer(a)
    return a, len(layers), layers[-1](a)


@program(x, "relu", again=(x, "tanh"), change="table['relu'] = nn.GELU()")
def module_dict(a, name):
    return table[name](a), name in table, list(table)


@program(x, change="pair[0] = nn.Parameter(torch.full((4,), 3.0))")
def parameter_list(a):
    return a * pair[0] + pair[1], len(pair)


@program(x, nn.Linear(4, 2), again=(x, nn.Linear(4, 3)))
def module_as_argument(a, layer):
    return layer(a), layer.out_features


@program(x, whole=False)
def module_made_in_the_frame(a):
    layer = nn.LayerNorm(4)
    return layer(a)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids % 5))


tied = Tied()


@program(torch.tensor([1, 4]), change="tied.head.weight = nn.Parameter(torch.ones(5, 4))")
def tied_weights(ids):
    return tied(ids), tied.head.weight is tied.embed.weight


@program(x, change="net.first.weight.requires_grad_(False)")
def frozen_weights(a):
    return net(a)


@program(x, whole=False)
def functional_call(a):
    given = {"weight": weight * 2, "bias": a[0]}
    return torch.func.functional_call(net.first, given, (a,))


# -- modes


@program(x)
def no_grad_block(a):
    with torch.no_grad():
        b = a @ weight
        with torch.enable_grad():
            c = a @ weight
    return b, c, torch.is_grad_enabled()


@program(x, change="torch.set_grad_enabled(False)")
def grad_mode_outside(a):
    return a @ weight, torch.is_grad_enabled()


@program(x)
def grad_mode_is_left_changed(a):
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return a @ weight


@program(x)
def no_grad_and_an_exception(a):
    try:
        with torch.no_grad():
            raise ValueError
    except ValueError:
        return a @ weight, torch.is_grad_enabled()


@torch.no_grad()
def frozen(a):
    return a * 2


@program(w)
@torch.enable_grad()
def grad_mode_decorators(a):
    return frozen(a), a * 2


@program(x)
def set_grad_enabled_as_function(a):
    previous = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    b = a @ weight
    torch.set_grad_enabled(previous)
    return b, a @ weight


@program(x, whole=False)
def inference_mode_block(a):
    with torch.inference_mode():
        b = a @ weight
    return b.is_inference(), b.requires_grad, a @ weight


@program(x, whole=False)
@torch.inference_mode()
def inference_mode_decorator(a):
    return a @ weight + 1


@program(x)
def autocast_block(a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = a @ weight
        c = b.float() + 1
        with torch.autocast("cpu", enabled=False):
            d = a @ weight
    return b, c, d


@program(x)
@torch.autocast("cpu", dtype=torch.bfloat16)
def autocast_decorator(a):
    return F.linear(a, weight), a + 1


@program(x, change="torch.set_default_dtype(torch.float64)")
def default_dtype(a):
    made = torch.ones(4) * 0.1
    return a + made, made.dtype


@program(x, whole=False)
def default_dtype_set_in_the_frame(a):
    torch.set_default_dtype(torch.float64)
    made = torch.ones(4) * 0.1
    torch.set_default_dtype(torch.float32)
    return a + made, made.dtype


@program(x, whole=False)
def default_device_context(a):
    with torch.device("meta"):
        made = torch.empty(3)
    return a, made.device, made.shape


@program(x, whole=False)
def saved_tensor_hooks(a):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        b = w.exp().sum()
    return a * b, len(packed)


@program(x, whole=False)
def function_mode(a):
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {})) * 2

    with Doubling():
        return torch.add(a, 1)


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@program(x.as_subclass(Tagged), whole=False)
def tensor_subclass(a):
    return a * 2, type(a + 1).__name__


@program(x, whole=False)
def forked_random_state(a):
    with torch.random.fork_rng():
        noise = torch.rand(1)
    return a + noise


# -- autograd


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, k):
        ctx.save_for_backward(a)
        ctx.k = k
        return a**3 * k

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return 30 * a**2 * grad * ctx.k, None


@program(w, 2, whole=False)  # one graph with the plug-in function_graphs
def custom_function(a, k):
    return Cubed.apply(a, k)


@program(w, change="w.grad = None", whole=False)
def custom_function_backward(a):
    Cubed.apply(a, 1).sum().backward()
    return a.grad


@program(x, whole=False)  # one graph with the plug-in function_graphs
def checkpointed(a):
    def block(t):
        return (t @ weight).relu()

    return checkpoint(block, a, use_reentrant=False)


@program(x, whole=False)
def backward_in_the_frame(a):
    loss = (a @ weight).square().mean()
    loss.backward()
    return loss.detach(), weight.grad


@program(x, whole=False)
def gradients_by_autograd_grad(a):
    (grad,) = torch.autograd.grad((a @ weight).sum(), weight)
    return grad * 2


@program(x)
def requires_grad_switched_on(a):
    b = a.clone().requires_grad_()
    return b * 2, b.requires_grad, (b * 2).is_leaf


@program(x, w, whole=False)
def requires_grad_of_what_the_frame_makes(a, b):
    c, d = a[None], b.detach()
    c.requires_grad = True
    d.requires_grad_().requires_grad_(False)
    return c * 2, (b * d).requires_grad, (b * 2).requires_grad_(), c.is_leaf, (c * b).is_leaf


@program(x, whole=False)
def requires_grad_of_an_argument(a):
    a.requires_grad_()
    return (a * 2).requires_grad


@program(w, whole=False)
def requires_grad_of_a_computed_tensor(a):
    return (a * 2).requires_grad_(False)


@program(w)
def detached(a):
    b = a.detach()
    return b, b * 2, a * b, b.requires_grad


@program(w, whole=False)
def gradient_hooks(a):
    b = a * 2
    b.register_hook(lambda grad: grad * 100)
    return b.sum()


model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@program(x, change="optimizer.param_groups[0]['lr'] = 0.5", whole=False)
def training_step(a):
    optimizer.zero_grad()
    loss = model(a).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), model.weight.detach().clone()


@program(x, whole=False)
def functional_gradients(a):
    return torch.func.grad(lambda t: (t**2).sum())(a), torch.func.vmap(lambda r: r * 2)(a)


@program(x)
def parameter_updated_without_grad(a):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    return a @ model.weight.T


@program(w, whole=False)
def in_place_on_a_leaf_is_an_error(a):
    try:
        a.add_(1)
    except RuntimeError as error:
        return str(error)


@program(x)
def detached_and_back(a):
    b = (a @ w).detach()
    return b, (b @ w).requires_grad


@program(torch.ones(3), torch.ones(2, 3), whole=False)
def lists_changed_in_place(a, b):
    torch._foreach_mul_([a, b], 2.0)
    torch._foreach_add_([b], [a])
    return a + 1
