"""What we need of torch's private names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.nn.modules import module as every_module
from torch.nn.parallel import DistributedDataParallel

from fusedrl.compat.library import Library

TORCH = Library("torch", tried="2.13.0")

_Function = TypeVar("_Function", bound=Callable[..., Any])

is_transformed = TORCH.take(
    "torch._C._functorch:is_functorch_wrapped_tensor",
    "a tensor inside of a transform of torch.func has no memory of its own",
)
is_batched = TORCH.take("torch._C._functorch:is_batchedtensor", "a tensor inside of vmap")
is_batched_for_gradients = TORCH.take(
    "torch._C._functorch:is_legacy_batchedtensor",
    "a gradient of a batch of them (is_grads_batched)",
)
untransformed = TORCH.take(
    "torch._C._functorch:get_unwrapped", "the tensor in a transformed one may record a gradient"
)
transform_level = TORCH.take(
    "torch._C._functorch:maybe_current_level", "nothing is read by address inside of a transform"
)


@TORCH.needs("torch.autograd.forward_ad:_current_level")
def in_forward_mode() -> bool:
    """Whether tensors may have tangents, which no kernel has."""
    return forward_ad._current_level >= 0


@TORCH.needs("torch._C:_len_torch_dispatch_stack")
def in_dispatch_mode() -> bool:
    """Whether a dispatch mode sees the ops, and no addresses."""
    return torch._C._len_torch_dispatch_stack() > 0


@TORCH.needs("torch._C:_is_tracing")
def in_trace_of_jit() -> bool:
    """Whether torch.jit.trace records the ops; its own question takes 2 µs."""
    return torch._C._is_tracing()


@TORCH.needs("torch._C._autograd:_get_current_graph_task_keep_graph")
def graph_is_kept() -> bool:
    """Whether another backward pass may read what was saved for the running one."""
    return _autograd._get_current_graph_task_keep_graph()


@TORCH.needs("torch._ops:OpOverload._tags")
def keep_out_of_cuda_graphs(op: Any) -> None:
    """Tell Inductor not to capture an overload; the stable ABI takes tags from torch 2.12 on."""
    op._tags.append(torch.Tag.cudagraph_unsafe)


@TORCH.needs("torch.ops:aten._assert_async")
def assert_on_device(condition: Tensor, message: str) -> None:
    """An assertion that runs on the tensor's device, for which the host does not wait."""
    torch.ops.aten._assert_async.msg(condition, message)


_JAGGED = "torch.nested._internal.nested_tensor:NestedTensor"


@TORCH.needs(f"{_JAGGED}._ragged_idx")
def ragged_dimension(jagged: NestedTensor) -> int:
    """The dimension whose length differs between the parts of a jagged tensor."""
    return jagged._ragged_idx


@TORCH.needs(f"{_JAGGED}._lengths")
def lengths_beside_holes(jagged: NestedTensor) -> Tensor | None:
    """The lengths of the rows of a jagged tensor whose values have holes; ``None`` without."""
    return jagged._lengths


@TORCH.needs(f"{_JAGGED}._values")
def values_without_history(jagged: NestedTensor) -> Tensor:
    """The values of a jagged tensor, where no gradient is recorded.

    Through the dispatcher, as a gradient needs it, this costs as much as a kernel on 100k tokens.
    """
    return jagged._values


@TORCH.needs("torch._C:DisableTorchFunctionSubclass")
def as_plain_tensor() -> AbstractContextManager[Any]:
    """A block in which a subclass of tensors is asked as a tensor."""
    return torch._C.DisableTorchFunctionSubclass()


@TORCH.needs("torch:Tensor._nested_tensor_size")
def strided_sizes(nested: Tensor) -> Tensor:
    """The sizes of the parts of a strided nested tensor, on the host."""
    return nested._nested_tensor_size()


@TORCH.needs("torch:Tensor._nested_tensor_strides", "torch:Tensor._nested_tensor_storage_offsets")
def strided_layout(nested: Tensor) -> tuple[Tensor, Tensor]:
    """The strides of the parts of a strided nested tensor, and where they begin in its storage."""
    return nested._nested_tensor_strides(), nested._nested_tensor_storage_offsets()


@TORCH.needs("torch:_nested_view_from_buffer")
def strided_view(values: Tensor, sizes: Tensor, strides: Tensor, starts: Tensor) -> Tensor:
    """A strided nested tensor over memory that exists; ``values`` is its storage, ``[n]``."""
    return torch._nested_view_from_buffer(  # pyright: ignore[reportPrivateImportUsage]
        values, sizes, strides, starts
    )


@TORCH.needs("torch.nn:Module._modules")
def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict that holds a module's children.

    The public iterators over modules, parameters and buffers take several times as long, and leave
    out what is there twice.
    """
    return module._modules


@TORCH.needs("torch.nn:Module._modules")
def replace_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Give a module another dict of children, where a copy of it shares its dict with others."""
    vars(module)["_modules"] = children


@TORCH.needs("torch.nn:Module._parameters")
def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that holds a module's own parameters."""
    return module._parameters


@TORCH.needs("torch.nn:Module._buffers")
def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers


@TORCH.needs("torch.nn:Module._non_persistent_buffers_set")
def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that no state dict has."""
    return module._non_persistent_buffers_set


@TORCH.needs("torch:UntypedStorage._cdata")
def storage_of(tensor: Tensor) -> int:
    """A number of the storage in which a tensor lies, while the storage exists.

    Its address is no such number, as that of all memory that was freed is 0.
    """
    return tensor.untyped_storage()._cdata


@TORCH.needs("torch:_foreach_copy_")
def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy any number of tensors in one fused operation."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


# What torch.compile makes of a module: a wrapper with the module under this name, or a call.
(COMPILED_CHILD,) = TORCH.names(
    "torch._dynamo.eval_frame:OptimizedModule",
    ("_orig_mod",),
    "the module that torch.compile was called with",
)
(CHECKPOINTED_CHILD,) = TORCH.names(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:ActivationWrapper",
    ("_checkpoint_wrapped_module",),
    "the module whose activations are computed again in the backward pass",
)
(COMPILED_CALL,) = TORCH.names(
    "torch.nn:Module", ("_compiled_call_impl",), "what Module.compile() has made of a module's call"
)


def uncompiled(module: Any) -> Any:
    """The module that ``torch.compile`` was called with, or the module itself."""
    return children_of(module).get(COMPILED_CHILD, module)


def is_compiled(module: Any) -> bool:
    """Whether a module is what ``torch.compile`` has made of another one."""
    return COMPILED_CHILD in children_of(module)


@TORCH.needs("torch._dynamo.eval_frame:innermost_fn")
def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Whether ``torch.compile`` has made a function or what a method is bound from."""
    from torch._dynamo.eval_frame import innermost_fn  # loaded late: it takes seconds

    function = getattr(function, "__func__", function)
    return innermost_fn(function) is not function


_FORWARD_HOOKS = TORCH.names(
    "torch.nn:Module", ("_forward_hooks", "_forward_pre_hooks"), "whether a module has hooks"
)
_BACKWARD_HOOKS = TORCH.names(
    "torch.nn:Module", ("_backward_hooks", "_backward_pre_hooks"), "whether a module has hooks"
)
TORCH.names(
    "torch.nn.modules.module",
    [f"_global{name}" for name in (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)],
    "whether all modules have hooks",
)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run at a module's call, or at its backward pass if there may be one.

    Those of FSDP and of tensor parallelism do not count, which move parameters and results between
    ranks and change no value.
    """
    names = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS) if torch.is_grad_enabled() else _FORWARD_HOOKS
    hooks = (h for n in names for h in (getattr(every_module, f"_global{n}"), getattr(module, n)))
    return any(not _of_ranks(hook) for kind in hooks for hook in kind.values())


def hooks_of(module: nn.Module) -> list[int]:
    """The numbers of the hooks that run at a module's call, which no other hook ever has."""
    return [number for name in _FORWARD_HOOKS for number in getattr(module, name)]


def _of_ranks(hook: Any) -> bool:
    return getattr(hook, "__module__", None) in (_FSDP_STATE, _TENSOR_PARALLEL)


# What fully_shard makes of a module.

_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_TENSOR_PARALLEL = "torch.distributed.tensor._api"
TORCH.names(_TENSOR_PARALLEL, ("distribute_module",), "its hooks stay in force around a part")
TORCH.names(_FSDP_STATE, ("FSDPState",), "its hooks stay in force around a part of a model")
_FSDP_MODULE = "torch.distributed.fsdp:FSDPModule"


def is_fully_sharded(module: Any) -> bool:
    """Whether ``fully_shard`` was called with a module, whose call gathers its parameters."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_of(module: Any) -> type:
    """The class that a module was made of, of which ``fully_shard`` makes another one."""
    kind: Any = type(module)
    if not is_fully_sharded(module):
        return kind
    # Up to torch 2.10, behind the class that was made and FSDPModule; from 2.11 on, the class says.
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]


@TORCH.needs(f"{_FSDP_MODULE}._get_fsdp_state", f"{_FSDP_STATE}:FSDPState._fsdp_param_group")
def fsdp_meshes(module: Any) -> list[Any]:
    """The meshes over which ``fully_shard`` has spread a module, whose parameters may be whole."""
    state = vars(module._get_fsdp_state())
    # Up to torch 2.11 a module has one group or None, from 2.12 on a list of groups.
    groups = state.get("_fsdp_param_groups", [state.get("_fsdp_param_group")])
    return [group.mesh_info.mesh for group in groups if group is not None]


# Traces.


def constant_in_traces(function: _Function) -> _Function:
    """Let a trace take a function's answer as a constant.

    ``torch.compiler.assume_constant_result`` says the same, and imports the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@TORCH.needs("torch.nn.parallel:DistributedDataParallel._active_ddp_module")
def in_forward_of_ddp() -> bool:
    """Whether the forward of DDP is running, which sees what its module computes."""
    return DistributedDataParallel._active_ddp_module is not None


@TORCH.needs("torch.distributed.distributed_c10d:_get_default_store")
def store_of_ranks() -> Any:
    """What the ranks of this process's group tell each other beside their collectives."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# Storages, and the ops that write to them.

DispatchMode = TORCH.take(
    "torch.utils._python_dispatch:TorchDispatchMode",
    "what a loader copies from where is seen op by op",
)


@TORCH.needs("torch._ops:OpOverload._schema")
def writes(op: Any) -> bool:
    """Whether an op writes to one of its tensors, in a dispatch mode."""
    return op._schema.is_mutable


# Containers.

map_leaves = TORCH.take(
    "torch.utils._pytree:tree_map", "states are dicts and lists of tensors, nested as they come"
)
