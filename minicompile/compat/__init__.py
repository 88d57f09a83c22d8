"""The only place that touches private parts of torch or Triton, and where their versions differ.

    takes    what the package needs of torch and Triton that their public API leaves out
    gives    it under a public name, alike in torch 2.11 to 2.15 and Triton 3.6 to 3.9
    decides  which private function answers, and what is done where a version lacks it

One file for each concern. Read private.py first: each private name is taken through it, with what its loss
means, so that a release without the name costs a reason and no exception; then versions.py. settings.py is
about what a process has set, triton_api.py about Triton and GPUs; torch_compiler.py alone knows the systems
that we teach. The names of all other files are imported from here.
"""

from minicompile.compat.autograd import (
    WatchedHooks,
    clear_saved_tensors,
    direct_apply,
    function_apply,
    grad_and_value_impl,
    grad_impl,
    of_hook,
    saved_tensors,
    top_saved_tensors_hooks,
    without_saved_tensor_hooks,
)
from minicompile.compat.dispatch import (
    TorchDispatchMode,
    autograd_kernels,
    below_autograd,
    is_composite,
    no_dispatch_modes,
    no_function_modes,
    onednn_linear,
    python_dispatcher,
    torch_decompositions,
    torch_kernels_as_in_eager,
)
from minicompile.compat.fakes import (
    FAKE_LIMITS,
    FakeTensor,
    fake_mode,
    fakes_again,
    new_fake,
    quiet_fakes,
    silent_log,
)
from minicompile.compat.functions import (
    BUILTINS,
    CONTROL_FLOW,
    GLOBAL_HOOK_TABLES,
    TensorBase,
    is_operator_binding,
    module_call,
    module_call_impl,
    module_getattr,
    wrapped_original,
)
from minicompile.compat.graphs import (
    boxed_function,
    graph_function,
    graph_module,
    map_aggregate,
    releasing_text,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_spread,
    tree_unflatten,
)
from minicompile.compat.guards import TENSOR_FACTS, tensor_facts, tensor_guards
from minicompile.compat.memory import (
    empty_strided_cpu,
    has_storage,
    storage_id,
    storage_pointer,
    storage_uses,
)
from minicompile.compat.private import PART_GONE, PARTS, require
from minicompile.compat.settings import AUTOCAST_DEVICES, any_autocast_enabled, without_autocast
from minicompile.compat.versions import PYTHON_UNKNOWN, TESTED, check_capture, warn_if_untested
from minicompile.compat.views import autograd_base, is_view
