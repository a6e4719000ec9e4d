"""Tensors of a simulated GPU, and pinned host memory: subclasses of torch.Tensor over CPU memory, with ``device.type == "cuda"``.

torch calls :func:`dispatch` for each operation. A view is made at once. Any other operation on tensors of the GPU goes to the current
stream and runs later, on the memory as it then is; its result has memory at once. An operation whose result the host needs waits for the
stream, as on hardware: ``item``, ``tolist``, ``cpu``, copies between the GPU and host memory that is not pinned (CUDA Runtime API, "API
synchronization behavior").
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from sim import memory
from sim.scheduler import Fault, here

_aten: Any = torch.ops.aten
_CPU = torch.device("cpu")


class Simulated(torch.Tensor):
    """A tensor of the simulation. ``inner``: the same memory, as a plain CPU tensor, which only the simulator touches."""

    gpu: Any
    inner: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class DeviceTensor(Simulated):
    """A tensor of a simulated GPU."""

    lease: memory.Lease

    @staticmethod
    def __new__(cls, gpu: Any, inner: torch.Tensor, lease: memory.Lease) -> DeviceTensor:
        self = torch.Tensor._make_subclass(cls, inner, False, dispatch_device=True, device_for_backend_keys=gpu.device)
        self.gpu, self.inner, self.lease = gpu, inner, lease
        return self

    @property
    def device(self) -> torch.device:
        return self.gpu.device

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu() first")
        return self.cpu().numpy()

    def untyped_storage(self) -> torch.UntypedStorage:
        if self.lease.storage is None:
            self.lease.storage = torch.UntypedStorage(self.inner.untyped_storage().nbytes(), device="meta")
        return self.lease.storage

    def record_stream(self, stream: Any) -> None:
        self.lease.holders.append(stream.lane)


class PinnedTensor(Simulated):
    """A tensor in pinned host memory. The host's reads and writes of it are accesses, which need an order with those of streams."""

    @staticmethod
    def __new__(cls, gpu: Any, inner: torch.Tensor) -> PinnedTensor:
        self = torch.Tensor._make_subclass(cls, inner, False)
        self.gpu, self.inner = gpu, inner
        return self

    def is_pinned(self, device: Any = None) -> bool:
        return True

    def tolist(self) -> Any:
        self.gpu.host_access(self.inner, False, "tolist")
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        self.gpu.host_access(self.inner, False, "numpy")
        return self.inner.numpy(force=force)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Simulated) else value


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Carry out one operation of torch."""
    if func is torch.ops.prim.device.default:
        return args[0].device
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, *args, **kwargs)
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_device = [leaf for leaf in found if isinstance(leaf, DeviceTensor)]
    if not on_device:
        return _on_host(func, args, kwargs)
    if func.is_view:
        return _view(func, args, kwargs, on_device[0])
    return _enqueue(func, args, kwargs, found)


def _view(func: Any, args: Any, kwargs: dict[str, Any], of: DeviceTensor) -> Any:
    inner_args, inner_kwargs = pytree.tree_map(_inner, (args, kwargs))
    with torch.inference_mode():
        result = func(*inner_args, **inner_kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda inner: DeviceTensor(of.gpu, inner, of.lease), result)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of the host that has pinned tensors among its arguments."""
    pinned = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, PinnedTensor)]
    if not func.is_view:
        written = _written(func, args, kwargs)
        for tensor in pinned:
            tensor.gpu.host_access(tensor.inner, any(tensor is one for one in written), func.__name__)
    inner_args, inner_kwargs = pytree.tree_map(_inner, (args, kwargs))
    with torch.inference_mode():
        result = func(*inner_args, **inner_kwargs)
    originals = {id(tensor.inner): tensor for tensor in pinned}

    def wrap(inner: torch.Tensor) -> torch.Tensor:
        if id(inner) in originals:
            return originals[id(inner)]
        return PinnedTensor(pinned[0].gpu, inner) if func.is_view else inner

    return pytree.tree_map_only(torch.Tensor, wrap, result)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _enqueue(func: Any, args: Any, kwargs: dict[str, Any], found: list[torch.Tensor]) -> Any:
    """Put an operation on the current stream; wait for it where its result is no tensor."""
    gpu = _gpu(func, found)
    for tensor in found:
        if not isinstance(tensor, DeviceTensor) and tensor.dim():
            raise RuntimeError(f"Expected all tensors to be on the same device, got {gpu.device} and {tensor.device}")
    inner_args, inner_kwargs = pytree.tree_map(
        lambda value: value.clone() if type(value) is torch.Tensor else _inner(value), (args, kwargs)
    )
    written = _written(func, args, kwargs)
    name = f"torch {func.__name__}"
    if not all(isinstance(item.type, torch.TensorType) or "Tensor" in str(item.type) for item in func._schema.returns):
        gpu.synchronize_stream(f"{name}, whose result the host needs", tensors=[_inner(one) for one in found])
        with torch.inference_mode():
            return func(*inner_args, **inner_kwargs)
    writes = [tensor.inner for tensor in written if isinstance(tensor, DeviceTensor)]
    reads = [
        tensor.inner
        for tensor in found
        if isinstance(tensor, DeviceTensor) and not any(tensor is one for one in written)
    ]
    if not func._schema.returns or func._schema.returns[0].alias_info is not None:
        gpu.launch("kernel", name, lambda: func(*inner_args, **inner_kwargs), reads, writes)
        results = tuple(written[: len(func._schema.returns)])  # lists of tensors are written without a result
        return results[0] if len(results) == 1 else results or None
    meta_args, meta_kwargs = pytree.tree_map(_meta, (args, kwargs))
    shapes, tree = pytree.tree_flatten(func(*meta_args, **meta_kwargs))
    if func in _FACTORIES:
        return gpu.allocate(shapes[0].shape, shapes[0].stride(), shapes[0].dtype)
    outs = [gpu.allocate(shape.shape, shape.stride(), shape.dtype) for shape in shapes]
    targets = [out.inner for out in outs]

    def body() -> None:
        for target, result in zip(targets, pytree.tree_leaves(func(*inner_args, **inner_kwargs)), strict=True):
            target.copy_(result)

    if "device" in inner_kwargs:
        inner_kwargs["device"] = _CPU
    gpu.launch("kernel", name, body, reads, [*writes, *targets])
    return pytree.tree_unflatten(outs, tree)


def _gpu(func: Any, found: list[torch.Tensor]) -> Any:
    """Return the GPU of the tensors, which is the calling rank's."""
    gpus = {tensor.gpu for tensor in found if isinstance(tensor, DeviceTensor)}
    gpu = gpus.pop()
    if gpus or gpu.machine.mine() is not gpu:
        gpu.machine.fail("device", f"{func} at {here()} uses the memory of another rank's GPU")
    return gpu


def _copy(func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    there, here_ = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
    if not there and not here_:
        return _on_host(func, (target, source, non_blocking), {})
    gpu = _gpu(func, [target, source])
    if target.shape != source.shape:
        source = source.expand(target.shape)
    to, origin = _inner(target), _inner(source)
    plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if there and here_:
        gpu.launch("copy" if plain else "kernel", "copy_", lambda: to.copy_(origin), [origin], [to])
        return target
    # A copy between dtypes goes through a temporary of the device (aten/src/ATen/native/cuda/Copy.cu); the meaning is the same.
    host = target if here_ else source
    if isinstance(host, PinnedTensor) or gpu.is_locked(host):
        gpu.launch("copy", "copy_", lambda: to.copy_(origin), [origin], [to])
        if not non_blocking:
            gpu.synchronize_stream("a copy that is not non_blocking")
        return target
    if there:
        origin = origin.clone()  # the driver takes a copy of pageable memory before it returns
    reads, writes = ([], [to]) if there else ([origin], [])
    gpu.launch("copy", "copy_", lambda: to.copy_(origin), reads, writes)
    gpu.synchronize_stream("a copy from or to pageable host memory")
    return target


def _to_copy(func: Any, source: torch.Tensor, **options: Any) -> Any:
    device = options.get("device")
    device = source.device if device is None else torch.device(device)
    dtype = options.get("dtype") or source.dtype
    wanted = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
    if options.get("memory_format") is torch.contiguous_format or not source.is_contiguous():
        wanted = torch.empty(source.shape, dtype=dtype, device="meta")
    non_blocking = bool(options.get("non_blocking"))
    gpu: Any = source.gpu  # type: ignore[attr-defined]
    if device.type == "cuda":
        result: torch.Tensor = gpu.machine.gpu(device).allocate(wanted.shape, wanted.stride(), dtype)
    elif non_blocking and isinstance(source, DeviceTensor):  # aten/src/ATen/native/TensorConversions.cpp, pin_out
        memory = gpu.allocator.pinned(wanted.numel() * dtype.itemsize)[: wanted.numel() * dtype.itemsize]
        result = PinnedTensor(gpu, memory.view(dtype).as_strided(wanted.shape, wanted.stride()))
    else:
        result = torch.empty_strided(wanted.shape, wanted.stride(), dtype=dtype)
    return _copy(_aten.copy_.default, result, source, non_blocking)


def _scalar(func: Any, tensor: Any) -> Any:
    if isinstance(tensor, PinnedTensor):
        return _on_host(func, (tensor,), {})
    _gpu(func, [tensor]).synchronize_stream("the value of a tensor", tensors=[tensor.inner])
    return tensor.inner.item()


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise Fault("unsupported", f"{func} on a simulated tensor, at {here()}")


_SPECIAL = {
    _aten.copy_.default: _copy,
    _aten._to_copy.default: _to_copy,
    _aten._local_scalar_dense.default: _scalar,
    **{func: _refuse for func in (_aten.resize_.default, _aten.set_.source_Tensor, _aten.set_.source_Storage)},
}
#: Operations that make memory and write nothing.
_FACTORIES = {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}
