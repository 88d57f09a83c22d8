"""Every extension point on one page: the decorators that add a rule to a room, and how to undo them.

| decorator | adds | room |
| --- | --- | --- |
| `bytecode(opname)` | what the interpreter does with an instruction | dynamo |
| `call_rules(function)` | what capturing a call of a function means | dynamo |
| `operations(name)` | what a Python operation means: loading an attribute, adding, iterating | dynamo |
| `guard_rules(kind)` | how a kind of guard is checked | dynamo |
| `quick_checks(kind)` | a quicker check of all guards on settings, or on held objects | dynamo |
| `frame_watchers(name)` | what sees the functions that eager code calls | dynamo |
| `register_vjp(operator)` | an operator's gradient, in training | aot |
| `around_trace(name)` | a context in which graphs are traced for training | aot |
| `inverse(view operator)` | how a write through a view reaches what it is a view of | aot |
| `decompose(operator, to=level)` | an operator in terms of simpler ones | aot |
| `register_pattern(name, search=, examples=, stage=)` | a rewrite of captured or ATen graphs | aot |
| `graph_pass(name, stage=)` | any pass over these graphs | aot |
| `partitioner(name)` | another choice of what the forward saves for the backward | aot |
| `lowering(operator)` | an operator as a loop | lowering |
| `fusion_rule("policy")` | a `FusionPolicy`: which loops share a kernel | scheduling |
| `align_rule(name)` | common loops of two special nests, or why they share no kernel | scheduling |
| `template(operator)` | an operator as a loop that a template computes, with "max-autotune" | lowering |
| `LEGALIZE.rule(operations, why=reason)` | what a loop operation becomes before it is printed | codegen |
| `plan_rule("language:step")` | a step of a kernel's plan: tiles, vector width, threads | codegen |
| `template_plan(operator)` | the plan of kernels that compute an extern operator | codegen |
| `rival_rule(name)` | other ways to compute what a kernel computes | codegen |
| `kernel_template(kind)` | a template: what prints kernels of a kind, as matrix products | codegen |
| `triton_op(name)` | how Triton writes a loop operation | codegen |
| `code_generator(language)` | a language that kernels are printed in | codegen |
| `kernel_loader(language)` | how its kernels are compiled and called | runtime |
| `tuner(name)` | which of several tiles and rivals a GPU's kernel is loaded with | runtime |
| `allocator(name)` | what gives large memory on the CPU, and keeps some for later calls | runtime |
| `around_compile(name)` | a function around the compilation of a capture: caches, CUDA graphs | pipeline |
| `backends(name)` | what `mc.compile(backend=name)` does | api |
| `gate(name)` | whether a single application of a rule may be done | all |
| `reduction(name)` | a way to make a failing program smaller | debug |
| `accuracy_stage(name)` | a way to run a function that `mc.accuracy` compares | debug |
| `observer(name)` | what hears of each stage as it is made | all |
| `log_channel(name, doc, kinds)` | a channel of `MINICOMPILE_LOGS`: what it prints of an event | debug |

`scoped()` forgets the rules registered inside its block; `without("lowering:aten.erf")` takes rules away for
a while. A plug-in is a package that uses these decorators, with a `Plugin` in it; ops/plugins.py finds and
loads it (`add_plugin` adds one by hand), and `plugins.rules(registry, options.plugins)` has the rules that a
compilation may use. Importing this page imports the built-in rules; decompositions come when one is first
needed.
"""

# ruff: noqa: F401 (names to import from here)

from typing import Any

from minicompile import RULES_OF_TOOLS, tool
from minicompile.aot.decompositions.registry import decompose
from minicompile.aot.functionalize import inverse
from minicompile.aot.joint import around_trace
from minicompile.aot.partition import partitioner
from minicompile.aot.passes import known_passes
from minicompile.api import backends
from minicompile.codegen.generate import code_generator
from minicompile.codegen.legalize import LEGALIZE
from minicompile.codegen.plan import plan_rule, rival_rule, template_plan
from minicompile.codegen.printing import kernel_template
from minicompile.codegen.triton_ops import triton_op
from minicompile.dynamo.dispatch import frame_watchers
from minicompile.dynamo.guards import guard_rules, quick_checks
from minicompile.dynamo.interpreter import bytecode
from minicompile.dynamo.world import call_rules, operations
from minicompile.lowering.context import template
from minicompile.lowering.lower import lowering
from minicompile.ops.events import observer
from minicompile.ops.gates import gate
from minicompile.ops.plugins import Plugin, add_plugin
from minicompile.ops.registry import Registry, scoped, without
from minicompile.passes.manager import graph_pass
from minicompile.pipeline import around_compile
from minicompile.runtime.load import allocator, kernel_loader, tuner
from minicompile.scheduling.fusion import FusionPolicy, align_rule, fusion_rule
from minicompile.scheduling.reasons import Verdict


def __getattr__(name: str) -> Any:
    """Return a decorator of a tool's: tools are imported when they are needed, and may be missing."""
    if name in RULES_OF_TOOLS:
        return getattr(tool(RULES_OF_TOOLS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
