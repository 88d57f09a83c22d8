"""A complete trace made by hand: what every view is tested on, without running any room."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile.aot.levels import LevelGraph
from minicompile.aot.result import (
    AotResult,
    ForwardValue,
    OutputSpec,
    Partition,
    RuntimeMetadata,
)
from minicompile.codegen.plan import (
    Alternative,
    CodeLine,
    KernelArgument,
    KernelSource,
    Phase,
    TritonPlan,
    WrapperSource,
)
from minicompile.dynamo.result import (
    Capture,
    GraphInput,
    Guard,
    InstructionRecord,
    Source,
)
from minicompile.lowering.ir import (
    ComputedBuffer,
    ExternKernel,
    ExternOutput,
    InputBuffer,
    Layout,
    LoopGraph,
    Pointwise,
    Reduction,
    View,
)
from minicompile.ops.graph import Graph, PassRecord
from minicompile.ops.origin import NO_ORIGINS, Origin, Origins, SourceLine
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.scheduling.body import record
from minicompile.scheduling.cost import Cost
from minicompile.scheduling.nodes import (
    Allocation,
    Block,
    Dependency,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    FusionDecision,
    InPlaceDecision,
    MemoryPlan,
    Schedule,
    SchedulerNode,
)

aten = torch.ops.aten
FILE = str(Path(__file__).with_name("model.py"))
ROWS, INNER, COLS = 512, 64, 128
CALL = SourceLine(FILE, 11, "block")
MM = Origin("matmul", "operator.matmul", (CALL, SourceLine(FILE, 7, "scores")))
RELU = Origin("relu", "torch.relu", (SourceLine(FILE, 12, "block"),))
SOFTMAX = Origin("softmax", "torch.softmax", (SourceLine(FILE, 13, "block"),))
CPU = torch.device("cpu")


def of(*origins: Origin) -> Origins:
    return frozenset(origins)


class GraphMaker:
    """Builds an fx graph whose nodes carry values and origins."""

    def __init__(self) -> None:
        self.graph, self.named = fx.Graph(), {}

    def input(self, name: str, *size: int) -> fx.Node:
        return self._keep(self.graph.placeholder(name), name, size, NO_ORIGINS, None)

    def call(
        self,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        size: Sequence[int],
        origins: Origins,
        phase: str | None = None,
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        return self._keep(node, name, size, origins, phase)

    def _keep(
        self, node: fx.Node, name: str, size: Sequence[int], origins: Origins, phase: str | None
    ) -> fx.Node:
        node.meta.update(val=torch.empty(tuple(size), device="meta"), origins=origins)
        if phase is not None:
            node.meta["phase"] = phase
        self.named[name] = node
        return node

    def finish(self, name: str, made_by: str, *outputs: str) -> Graph:
        self.graph.output([self.named[o] for o in outputs])
        return Graph(fx.GraphModule(torch.nn.Module(), self.graph), name, made_by)


def captured() -> Graph:
    made = GraphMaker()
    x, w = made.input("x", ROWS, INNER), made.input("w", INNER, COLS)
    h = made.call("matmul", operator.matmul, (x, w), (ROWS, COLS), of(MM))
    r = made.call("relu", torch.relu, (h,), (ROWS, COLS), of(RELU))
    made.call("softmax", torch.softmax, (r, -1), (ROWS, COLS), of(SOFTMAX))
    return made.finish("block", "capture", "softmax")


def forward_nodes(made: GraphMaker, phase: str | None) -> None:
    x, w = made.input("x", ROWS, INNER), made.input("w", INNER, COLS)
    full, row = (ROWS, COLS), (ROWS, 1)
    mm = made.call("mm", aten.mm.default, (x, w), full, of(MM), phase)
    relu = made.call("relu", aten.relu.default, (mm,), full, of(RELU), phase)
    amax = made.call("amax", aten.amax.default, (relu, [-1], True), row, of(SOFTMAX), phase)
    sub = made.call("sub", aten.sub.Tensor, (relu, amax), full, of(SOFTMAX), phase)
    exp = made.call("exp", aten.exp.default, (sub,), full, of(SOFTMAX), phase)
    total = made.call("sum_1", aten.sum.dim_IntList, (exp, [-1], True), row, of(SOFTMAX), phase)
    made.call("div", aten.div.Tensor, (exp, total), full, of(SOFTMAX), phase)


def backward_nodes(made: GraphMaker) -> None:
    full, row, phase = (ROWS, COLS), (ROWS, 1), "backward"
    tangent = made.input("tangents_1", *full)
    div, relu, x = (made.named[n] for n in ("div", "relu", "x"))
    mul = made.call("mul", aten.mul.Tensor, (tangent, div), full, of(SOFTMAX), phase)
    total = made.call("sum_2", aten.sum.dim_IntList, (mul, [-1], True), row, of(SOFTMAX), phase)
    part = made.call("mul_1", aten.mul.Tensor, (div, total), full, of(SOFTMAX), phase)
    sub = made.call("sub_1", aten.sub.Tensor, (mul, part), full, of(SOFTMAX), phase)
    le = made.call("le", aten.le.Scalar, (relu, 0), full, of(RELU), phase)
    where = made.call("where", aten.where.ScalarSelf, (le, 0.0, sub), full, of(RELU), phase)
    t = made.call("permute", aten.permute.default, (x, [1, 0]), (INNER, ROWS), of(MM), phase)
    made.call("mm_1", aten.mm.default, (t, where), (INNER, COLS), of(MM), phase)


def aot() -> AotResult:
    forward = GraphMaker()
    forward_nodes(forward, None)
    joint = GraphMaker()
    forward_nodes(joint, "forward")
    backward_nodes(joint)
    backward = GraphMaker()
    for name, size in (("x", (ROWS, INNER)), ("relu", (ROWS, COLS)), ("div", (ROWS, COLS))):
        backward.input(name, *size)
    backward_nodes(backward)
    functional = captured()
    joint_graph = joint.finish("joint", "joint", "div", "mm_1")
    partition = Partition(
        (
            ForwardValue("x", ROWS * INNER * 4, "an input is kept for free"),
            ForwardValue("relu", ROWS * COLS * 4, "cheaper than running the matrix product again"),
            ForwardValue("div", ROWS * COLS * 4, "an output is kept for free"),
        ),
        (ForwardValue("le", ROWS * COLS, "cheaper to compute again"),),
        ROWS * INNER * 4 + 2 * ROWS * COLS * 4,
        ROWS * INNER * 4 + 3 * ROWS * COLS * 4,
        "min-cut",
        {node.name: node.meta["origins"] for node in joint_graph.nodes if "origins" in node.meta},
    )
    before = str(functional)
    return AotResult(
        forward.finish("forward", "partition", "div", "relu"),
        backward.finish("backward", "partition", "mm_1"),
        joint_graph,
        partition,
        RuntimeMetadata(
            (OutputSpec("fresh", requires_grad=True),),
            differentiable_inputs=(1,),
            saved=3,
            trains=True,
        ),
        {
            "full": LevelGraph(functional.gm, "block", "capture"),
            "core": LevelGraph(
                joint_graph.gm, "joint", "joint", "core", {aten.softmax.int: [of(SOFTMAX)]}
            ),
        },
        [PassRecord("decompose", before, before.replace("torch.relu", "aten.relu"), 1)],
    )


def layout(*size: int) -> Layout:
    return Layout.contiguous(CPU, torch.float32, size)


def computed(
    name: str, size: tuple[int, ...], fn: Any, origins: Origins, why: str, reduce: str = ""
) -> ComputedBuffer:
    if reduce:
        loops: Any = Reduction(size, (COLS,), reduce, fn)
    else:
        loops = Pointwise(size, fn)
    return ComputedBuffer(name, layout(*size), origins, loops, why)


def loops() -> LoopGraph:
    full = (ROWS, COLS)

    def relu(ops: Any, i: Any) -> Any:
        o = ops.at(of(RELU))
        return o.maximum(o.load("buf0", COLS * i[0] + i[1]), o.constant(0.0, torch.float32))

    def exp(ops: Any, i: Any) -> Any:
        o = ops.at(of(SOFTMAX))
        return o.exp(o.sub(o.load("buf1", COLS * i[0] + i[1]), o.load("buf2", i[0])))

    def div(ops: Any, i: Any) -> Any:
        o = ops.at(of(SOFTMAX))
        return o.truediv(o.load("buf3", COLS * i[0] + i[1]), o.load("buf4", i[0]))

    def row(name: str) -> Any:
        return lambda ops, i, r: ops.at(of(SOFTMAX)).load(name, COLS * i[0] + r[0])

    mm = ExternKernel(
        "mm",
        aten.mm.default,
        (View("x", layout(ROWS, INNER)), View("w", layout(INNER, COLS))),
        {},
        (ExternOutput("buf0", layout(*full), of(MM)),),
        "library matrix product",
        of(MM),
    )
    return LoopGraph(
        "forward",
        [InputBuffer("x", layout(ROWS, INNER)), InputBuffer("w", layout(INNER, COLS))],
        [],
        [
            mm,
            computed("buf1", full, relu, of(RELU), "saved for backward"),
            computed("buf2", (ROWS,), row("buf1"), of(SOFTMAX), "a reduction", "max"),
            computed("buf3", full, exp, of(SOFTMAX), "read by a reduction and again after it"),
            computed("buf4", (ROWS,), row("buf3"), of(SOFTMAX), "a reduction", "sum"),
            computed("buf5", full, div, of(SOFTMAX), "an output"),
        ],
        [View("buf5", layout(*full)), View("buf1", layout(*full))],
    )


def schedule(graph: LoopGraph) -> Schedule:
    dtypes = dict.fromkeys(graph.buffers, torch.float32)
    before: list[Any] = []
    for operation in graph.operations:
        if isinstance(operation, ExternKernel):
            reads = tuple(Dependency(v.buffer, None) for v in operation.views())
            before.append(ExternKernelSchedulerNode(operation, reads, (Dependency("buf0", None),)))
            continue
        body = record(operation, dtypes)
        ranges = tuple(body.all_ranges.items())
        reads = tuple(Dependency(v.buffer, v.index, ranges) for v in body.loads)
        writes = tuple(Dependency(v.buffer, v.index, ranges) for v in body.stores)
        before.append(SchedulerNode(operation, body, reads, writes))
    nodes = before[1:]
    body = nodes[0].body
    x0, r0 = body.ranges
    fused = FusedSchedulerNode(
        nodes, [n.body for n in nodes], ["elem"] * len(nodes), {x0: ROWS}, {r0: COLS}
    )
    size = ROWS * COLS * 4
    one, two, three, four, five = nodes
    prologue, epilogue = "reduction_prologue", "reduction_epilogue"

    def decision(
        made: list[Any], used: Any, kind: Any, buffer: str, count: int, reason: str
    ) -> FusionDecision:
        fused, cause, saved = (True, "handed_over", ((buffer, count),))
        if made == [before[0]]:
            fused, cause = False, "extern"
        return FusionDecision(tuple(made), (used,), kind, fused, cause, reason, saved, 1, 3)

    decisions = [
        decision([one], two, prologue, "buf1", 2 * size, "same 512 rows"),
        decision([one, two], three, epilogue, "buf2", 2 * size, "same rows as the reduction"),
        decision([one, two, three], four, "vertical", "buf3", size, "same rows and columns"),
        decision([one, two, three, four], five, "vertical", "buf3", 2 * size, "the same rows"),
        decision([before[0]], one, "template_epilogue", "buf0", size, "a library call"),
    ]
    memory = MemoryPlan(
        [[Allocation("buf0")], [Allocation("buf1", "buf0", True), Allocation("buf5")]],
        [[], ["buf0"]],
        {},
        frozenset({"buf2", "buf3", "buf4"}),
        [size, 2 * size],
        [
            Block(("buf0", "buf1"), 0, 1, size, "own"),
            Block(("buf5",), 1, 1, size, "output"),
        ],
        [InPlaceDecision(1, "buf0", "buf1", True, "each element is read where it is written")],
    )
    return Schedule(graph, before, [before[0], fused], decisions, memory)


KERNEL = [
    ("@triton.jit", ()),
    ("def softmax_relu_0(in0, out0, out1, R: tl.constexpr):", ()),
    ("    row = tl.program_id(0)", ()),
    ("    c = tl.arange(0, R)  # one row", ()),
    ("    v0 = tl.load(in0 + row * 128 + c)", (RELU,)),
    ("    v1 = tl.where(v0 > 0, v0, 0.0)", (RELU,)),
    ("    tl.store(out1 + row * 128 + c, v1)", (RELU,)),
    ("    m = tl.max(v1, 0)", (SOFTMAX,)),
    ("    e = tl.exp(v1 - m)", (SOFTMAX, RELU)),
    ("    s = tl.sum(e, 0)", (SOFTMAX,)),
    ("    tl.store(out0 + row * 128 + c, e / s)", (SOFTMAX,)),
]


def kernel(done: Schedule) -> KernelSource:
    node = done.kernels[0]
    body = node.nodes[2].body
    plan = TritonPlan(
        "softmax_relu_0",
        "triton",
        torch.device("cuda"),
        node,
        body,
        (Phase("row", tuple(body.values)),),
        (
            KernelArgument("in0", "buf0", torch.float32, "in"),
            KernelArgument("out0", "buf5", torch.float32, "out"),
            KernelArgument("out1", "buf1", torch.float32, "out"),
        ),
        (),
        "persistent",
        tiles={"x": 1, "r": COLS},
        index_dtype=torch.int32,
        cost=Cost(ROWS * COLS * 4, 2 * ROWS * COLS * 4, 5 * ROWS * COLS),
        alternatives=(Alternative("looped reduction", "128 columns fit into one tile"),),
    )
    return KernelSource("softmax_relu_0", "triton", [CodeLine(t, of(*o)) for t, o in KERNEL], plan)


def wrapper(name: str, kernels: list[KernelSource]) -> WrapperSource:
    lines = [
        CodeLine("def call(args):"),
        CodeLine("    x, w = args"),
        CodeLine("    args.clear()"),
        CodeLine("    buf0 = empty((512, 128), torch.float32)", of(MM)),
        CodeLine("    aten.mm.out(x, w, out=buf0)", of(MM)),
        CodeLine("    buf1 = buf0  # memory reused", of(RELU)),
        CodeLine("    softmax_relu_0.run(buf0, buf5, buf1)", of(RELU, SOFTMAX)),
        CodeLine("    return (buf5, buf1)"),
    ]
    return WrapperSource(name, lines, kernels)


def capture() -> Capture:
    at = {7: SourceLine(FILE, 7, "scores"), 11: CALL, 12: RELU.stack[0], 13: SOFTMAX.stack[0]}
    steps = [
        (0, "RESUME", "0", CALL, 0, 0, ()),
        (2, "LOAD_GLOBAL", "scores", at[11], 0, 2, ()),
        (14, "LOAD_FAST", "x", at[11], 0, 3, ()),
        (16, "LOAD_FAST", "w", at[11], 0, 4, ()),
        (2, "LOAD_FAST", "x", at[7], 1, 1, ()),
        (4, "LOAD_FAST", "w", at[7], 1, 2, ()),
        (6, "BINARY_OP", "@", at[7], 1, 1, ("matmul",)),
        (10, "RETURN_VALUE", "", at[7], 1, 0, ()),
        (18, "CALL", "2", at[11], 0, 1, ()),
        (28, "STORE_FAST", "h", at[11], 0, 0, ()),
        (30, "LOAD_GLOBAL", "torch", at[12], 0, 1, ()),
        (42, "LOAD_ATTR", "relu", at[12], 0, 2, ()),
        (62, "LOAD_FAST", "h", at[12], 0, 3, ()),
        (64, "CALL", "1", at[12], 0, 1, ("relu",)),
        (74, "STORE_FAST", "h", at[12], 0, 0, ()),
        (76, "LOAD_GLOBAL", "torch", at[13], 0, 1, ()),
        (88, "CALL", "2", at[13], 0, 1, ("softmax",)),
        (120, "RETURN_VALUE", "", at[13], 0, 0, ()),
    ]
    x, w = Source("local", "x"), Source("local", "w")
    return Capture(
        "block",
        captured(),
        [
            GraphInput("x", x, torch.empty(ROWS, INNER, device="meta")),
            GraphInput("w", w, torch.empty(INNER, COLS, device="meta")),
        ],
        (
            Guard(
                (x,), "tensor", "f32[512, 64] on cpu", "its type and shape decide the graph", at[11]
            ),
            Guard(
                (w,), "tensor", "f32[64, 128] on cpu", "its type and shape decide the graph", at[11]
            ),
            Guard((x, w), "no_alias", True, "the graph writes neither"),
            Guard((Source("global", "scores"),), "identity", "scores", "it was inlined", at[11]),
        ),
        tuple(InstructionRecord(*step) for step in steps),
        "outputs[0]",
        ("scores",),
    )


def trace() -> Trace:
    """Forward compiled; the backward's stages repeat the forward's, which is enough to look at."""
    graphs = {}
    for name in ("forward", "backward"):
        graph = loops()
        graph.name = name
        done = schedule(graph)
        source = kernel(done)
        graphs[name] = CompiledStages(graph, done, [source.plan], [source], wrapper(name, [source]))
    return Trace("block", capture(), aot(), graphs)
