"""The private names of torch that fusedrl uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.nn.modules import module as every_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree

_Function = TypeVar("_Function", bound=Callable[..., Any])

# A tensor within a transform of torch.func has no memory, so that it cannot be read by address. The
# tensor that it wraps may record a gradient.
is_transformed = _functorch.is_functorch_wrapped_tensor
untransformed = _functorch.get_unwrapped
transform_level = _functorch.maybe_current_level
is_batched = _functorch.is_batchedtensor
is_batched_for_gradients = _functorch.is_legacy_batchedtensor  # is_grads_batched

DispatchMode = _python_dispatch.TorchDispatchMode
map_leaves = _pytree.tree_map


def in_forward_mode() -> bool:
    """Whether tensors may have tangents, which kernels ignore."""
    return forward_ad._current_level >= 0


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active, which sees ops but not reads by address."""
    return torch._C._len_torch_dispatch_stack() > 0


def in_trace_of_jit() -> bool:
    """Whether torch.jit.trace records the ops; the public function takes 2 µs."""
    return torch._C._is_tracing()


def keep_out_of_cuda_graphs(op: Any) -> None:
    """Exclude an op from Inductor's CUDA graphs; the stable ABI accepts tags from torch 2.12."""
    op._tags.append(torch.Tag.cudagraph_unsafe)


def assert_on_device(condition: Tensor, message: str) -> None:
    """An assertion on the tensor's device, without a synchronisation."""
    torch.ops.aten._assert_async.msg(condition, message)


def ragged_dimension(jagged: NestedTensor) -> int:
    """The dimension whose length differs between the parts of a jagged tensor."""
    return jagged._ragged_idx


def lengths_beside_holes(jagged: NestedTensor) -> Tensor | None:
    """The lengths of a jagged tensor's rows if there are holes between them, or ``None``."""
    return jagged._lengths


def values_without_history(jagged: NestedTensor) -> Tensor:
    """The values of a jagged tensor, for use where no gradient is recorded.

    The public call, which records one, costs as much as a kernel on 100k tokens.
    """
    return jagged._values


def as_plain_tensor() -> AbstractContextManager[Any]:
    """A block in which tensor subclasses do not override functions."""
    return torch._C.DisableTorchFunctionSubclass()


def strided_sizes(nested: Tensor) -> Tensor:
    """The sizes of the parts of a strided nested tensor, on the host."""
    return nested._nested_tensor_size()


def strided_view(values: Tensor, sizes: Tensor, strides: Tensor, starts: Tensor) -> Tensor:
    """A strided nested tensor over existing memory; ``values`` is its storage, ``[n]``."""
    return torch._nested_view_from_buffer(  # pyright: ignore[reportPrivateImportUsage]
        values, sizes, strides, starts
    )


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict that holds a module's children.

    The public iterators over modules, parameters and buffers take several times as long, and leave
    out duplicates.
    """
    return module._modules


def replace_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Give a module another dict of children, where copies of it share one dict."""
    vars(module)["_modules"] = children


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that holds a module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def storage_of(tensor: Tensor) -> int:
    """A number that identifies the storage of a tensor while the storage exists.

    Its address does not, since that of all freed memory is 0.
    """
    return tensor.untyped_storage()._cdata


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy any number of tensors in one fused operation."""
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


# What torch.compile makes of a module: a wrapper that has it under this name, or a call.
COMPILED_CHILD, COMPILED_CALL = "_orig_mod", "_compiled_call_impl"
# The name of the module that a checkpoint wrapper recomputes in the backward pass.
CHECKPOINTED_CHILD = "_checkpoint_wrapped_module"


def uncompiled(module: Any) -> Any:
    """The module that ``torch.compile`` was called with, or the module itself."""
    return children_of(module).get(COMPILED_CHILD, module)


def is_compiled(module: Any) -> bool:
    """Whether a module is a wrapper that ``torch.compile`` has made."""
    return COMPILED_CHILD in children_of(module)


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Whether ``torch.compile`` has made a function, or the function of a bound method."""
    from torch._dynamo.eval_frame import innermost_fn  # not at the top: it takes seconds

    function = getattr(function, "__func__", function)
    return innermost_fn(function) is not function


_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run at a module's call, or at its backward pass if there may be one.

    The hooks of FSDP and of tensor parallelism do not count: they move parameters and results
    between ranks, and change no value.
    """
    names = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS) if torch.is_grad_enabled() else _FORWARD_HOOKS
    hooks = (h for n in names for h in (getattr(every_module, f"_global{n}"), getattr(module, n)))
    return any(not _is_parallel_hook(hook) for kind in hooks for hook in kind.values())


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks before and after a module's call, by ids that are never reused."""
    return module._forward_pre_hooks, module._forward_hooks


def _is_parallel_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) in (_FSDP_STATE, _TENSOR_PARALLEL)


# FSDP2.

_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_TENSOR_PARALLEL = "torch.distributed.tensor._api"


def is_fully_sharded(module: Any) -> bool:
    """Whether ``fully_shard`` was called with a module, which gathers parameters when called."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_of(module: Any) -> type:
    """The original class of a module, which ``fully_shard`` replaces by another one."""
    kind: Any = type(module)
    if not is_fully_sharded(module):
        return kind
    # Up to torch 2.10 it follows the new class and FSDPModule; from 2.11 on there is an index.
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]


def fsdp_meshes(module: Any) -> list[Any]:
    """The meshes of a module that ``fully_shard`` was called with; its parameters may be whole."""
    state = vars(module._get_fsdp_state())
    # Up to torch 2.11 a module has one group or None, from 2.12 on a list of groups.
    many = "_fsdp_param_groups" in state
    groups = state["_fsdp_param_groups"] if many else [state["_fsdp_param_group"]]
    return [group.mesh_info.mesh for group in groups if group is not None]


# Traces.


def constant_in_traces(function: _Function) -> _Function:
    """Let traces use a function's result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def in_forward_of_ddp() -> bool:
    """Whether the forward pass of a DDP module is running."""
    return DistributedDataParallel._active_ddp_module is not None


def store_of_ranks() -> Any:
    """The key-value store that the ranks of this process's group share."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def writes(op: Any) -> bool:
    """Whether an op, as a dispatch mode gets it, writes to one of its tensors."""
    return op._schema.is_mutable
