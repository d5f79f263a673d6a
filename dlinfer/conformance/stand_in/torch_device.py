"""The stand-in in torch: tensors of a device of any name, with every ATen op.

``install`` gives torch's dispatch key PrivateUse1 a name and kernels. A few kernels are for memory and views. One
kernel serves all other ops: it computes on host views of the device's tensors. Like a kernel of a real device, it
refuses tensors on different devices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dlinfer.conformance.stand_in import memory

aten = torch.ops.aten

_TAKES_HOST_TENSORS = {
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Ops that accept host tensors together with device tensors: copies, and indexing by host indices."""

_libraries: list[torch.library.Library] = []  # torch removes a Library's kernels when the Library is freed
_names: list[str] = []


class Module:
    """The module ``torch.<name>`` of the device, like ``torch.cuda``. It has the functions that torch calls."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers come from the host's generator."""


def install(name: str, module: Module | None = None) -> None:
    """Create the device.

    A package names this function in the entry point group ``torch.backends``, so that torch calls it.

    module: the object to install as ``torch.<name>``, if torch or frameworks need more than ``Module`` has.

    If the process already has a PrivateUse1 device, this function does nothing and raises nothing, so that
    ``import torch`` goes on. If that device has another name, ``why_not`` returns the reason.
    """
    if _names or torch._C._get_privateuse1_backend_name() != "privateuseone":
        return
    _names.append(name)
    _setup_privateuseone_for_python_backend(name, backend_module=module or Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_by_the_host, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for name, kernel in _OWN.items():
        own.impl(name, kernel, "PrivateUse1")
    _libraries.extend((everything, own))


def why_not(name: str) -> str | None:
    """Return a reason why this process has no stand-in called ``name``; None if it has one."""
    if name in _names:
        return None
    taken = torch._C._get_privateuse1_backend_name()
    if taken == "privateuseone":
        return f"torch has no device {name!r}: its package is not installed, or torch's autoload is off"
    return f"torch allows one custom device in a process, and this process has {taken!r}"


# --- memory and views


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **unused: Any) -> Tensor:
    shape = torch.empty(
        size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
    )
    return memory.empty(shape.shape, shape.stride(), shape.dtype)


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **unused: Any) -> Tensor:
    return memory.empty(size, stride, dtype or torch.get_default_dtype())


def _as_strided(tensor: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    return memory.strided(
        tensor, size, stride, tensor.storage_offset() if storage_offset is None else storage_offset
    )


def _viewed(op: Any) -> Any:
    """Return a device kernel for a view op.

    The kernel runs the op on a host view to get the result's sizes and strides.
    """

    def view(tensor: Tensor, *args: Any) -> Tensor:
        return _view_like(tensor, op(memory.on_host(tensor), *args))

    return view


def _view_like(tensor: Tensor, host: Tensor) -> Tensor:
    return memory.strided(tensor, host.shape, host.stride(), host.storage_offset())


def _resize_(tensor: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    fresh = _empty(size, dtype=tensor.dtype, memory_format=memory_format)
    kept = min(tensor.numel(), fresh.numel())
    if kept:
        ends = memory.on_host(fresh).view(-1)[:kept], memory.on_host(tensor).reshape(-1)[:kept]
        ends[0].copy_(ends[1])
    return _set_(tensor, fresh.untyped_storage(), 0, fresh.shape, fresh.stride())


def _set_(
    tensor: Tensor, source: Any, offset: int | torch.SymInt, size: Sequence[int], stride: Sequence[int] = ()
) -> Tensor:
    op = aten.set_.source_Storage_storage_offset
    return op._op_dk(torch._C.DispatchKey.CPU, tensor, source, offset, size, stride)  # pyright: ignore[reportAttributeAccessIssue]


def _set_to(tensor: Tensor, source: Tensor) -> Tensor:
    return _set_(tensor, source.untyped_storage(), source.storage_offset(), source.shape, source.stride())


def _set_to_all_of(tensor: Tensor, source: Any) -> Tensor:
    """Make ``tensor`` a flat view of the whole storage ``source``.

    ``UntypedStorage.cpu`` and ``copy_`` need this kernel.
    """
    return _set_(tensor, source, 0, (source.nbytes() // tensor.dtype.itemsize,), (1,))


def _copy_(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    _host_of(tensor).copy_(_host_of(source))
    return tensor


_OWN = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "as_strided": _as_strided,
    "view": _viewed(aten.view.default),
    "_reshape_alias": _viewed(aten._reshape_alias.default),
    "unfold": _viewed(aten.unfold.default),
    "resize_": _resize_,
    "set_.source_Storage": _set_to_all_of,
    "set_.source_Storage_storage_offset": _set_,
    "set_.source_Tensor": _set_to,
    "copy_": _copy_,
}

# --- all other ops


def _by_the_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an op on host views of its arguments.

    Writes reach the device's memory, because a host view shares it. A result that is a view becomes a view on the
    device. A new result is copied to the device.
    """
    schema = op._schema
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    if op not in _TAKES_HOST_TENSORS:
        _refuse_two_devices(op, arguments)
    declared = [argument for argument in schema.arguments if argument.name in arguments]
    host = {argument.name: _argument(argument, arguments[argument.name], arguments) for argument in declared}
    by_name = {argument.name: host.pop(argument.name) for argument in declared if argument.kwarg_only}
    results = op(*host.values(), **by_name)
    several = len(schema.returns) != 1
    moved = [
        _result(op, returned, value, arguments)
        for returned, value in zip(schema.returns, results if several else (results,), strict=True)
    ]
    return tuple(moved) if several else moved[0]


def _argument(argument: Any, value: Any, arguments: dict[str, Any]) -> Any:
    if argument.is_out:
        return torch.empty(
            0, dtype=value.dtype, device="cpu"
        )  # device memory cannot be resized by the host's op
    if argument.name == "device" and value is not None:
        return torch.device("cpu")
    if isinstance(argument.type, torch.TensorType) and isinstance(value, (int, float, bool)):
        # torch writes a number as a number here, although it was a tensor that takes the other operand's dtype.
        other = next((leaf for leaf in arguments.values() if isinstance(leaf, Tensor)), None)
        return torch.scalar_tensor(value, dtype=None if other is None else torch.result_type(other, value))
    return pytree.tree_map_only(Tensor, _host_of, value)


def _result(op: Any, returned: Any, value: Any, arguments: dict[str, Any]) -> Any:
    """Return one result of ``op`` on the device: an argument that ``op`` wrote, a view of an argument, or a new tensor.

    returned: the schema's entry for this result. value: the result of the op on the host. arguments: name -> the
    argument that the caller passed.
    """
    alias = returned.alias_info
    if alias is None:
        return pytree.tree_map_only(Tensor, to_device, value)
    name = next(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.before_set & (alias.before_set | alias.after_set)
    )
    target = arguments[name]
    if not alias.is_write:
        return pytree.tree_map_only(Tensor, lambda view: _view_like(target, view), value)
    if next(argument for argument in op._schema.arguments if argument.name == name).is_out:
        if target.shape != value.shape:
            _resize_(target, value.shape)
        _host_of(target).copy_(value)
    return target


def _host_of(tensor: Tensor) -> Tensor:
    return memory.on_host(tensor) if tensor.device.type in _names else tensor


def to_device(host: Tensor) -> Tensor:
    copy = memory.empty(host.shape, host.stride(), host.dtype)
    memory.on_host(copy).copy_(host)
    return copy


def _refuse_two_devices(op: Any, arguments: dict[str, Any]) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors if tensor.dim() > 0} | {
        tensor.device.type for tensor in tensors if tensor.device.type in _names
    }
    if len(devices) > 1:
        both = " and ".join(sorted(devices))
        raise RuntimeError(f"{op}: expected all tensors on the same device, but found two: {both}")
