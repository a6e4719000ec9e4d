"""The functions of the CUDA driver that start kernels which NVRTC compiled: ctypes on libcuda."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

_pointer, _u32, _i32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32
#: Name in libcuda -> types of the arguments. Each returns a CUresult.
_FUNCTIONS = {
    "cuInit": [_u32],
    "cuDeviceGet": [ctypes.POINTER(_i32), _i32],
    "cuDeviceGetAttribute": [ctypes.POINTER(_i32), _i32, _i32],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_pointer), _i32],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_pointer)],
    "cuModuleLoadData": [ctypes.POINTER(_pointer), ctypes.c_char_p],
    "cuModuleGetFunction": [ctypes.POINTER(_pointer), _pointer, ctypes.c_char_p],
    "cuFuncSetAttribute": [_pointer, _i32, _i32],
    "cuLaunchKernel": [_pointer, *7 * [_u32], _pointer, ctypes.POINTER(_pointer), _pointer],
    "cuGetErrorName": [_i32, ctypes.POINTER(ctypes.c_char_p)],
    "cuGetErrorString": [_i32, ctypes.POINTER(ctypes.c_char_p)],
}
# Numbers of cuda.h.
_NOT_FOUND = 500
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


class Driver:
    """The driver, over the primary contexts of the devices, which torch uses too.

    Raises:
        RuntimeError: there is no driver, or it does not start.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, _i32
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"no CUDA driver: {error}") from error
        self._contexts: dict[int, int | None] = {}
        self._check(self._library.cuInit(0), "the CUDA driver does not start")

    def _check(self, status: int, what: str) -> None:
        if status:
            name, text = ctypes.c_char_p(), ctypes.c_char_p()
            self._library.cuGetErrorName(status, name)
            self._library.cuGetErrorString(status, text)
            said = [part.value.decode() for part in (name, text) if part.value]
            raise RuntimeError(f"{what}: {': '.join(said) or f'error {status} of the driver'}")

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability of a device."""
        handle, numbers = self._handle(device), (_i32(), _i32())
        for number, attribute in zip(numbers, (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR), strict=True):
            self._check(
                self._library.cuDeviceGetAttribute(number, attribute, handle),
                f"device {device} does not tell its compute capability",
            )
        return numbers[0].value, numbers[1].value

    def _handle(self, device: int) -> int:
        handle = _i32()
        self._check(self._library.cuDeviceGet(handle, device), f"there is no device {device}")
        return handle.value

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make the context of a device current for this thread, which may be a new one that has none yet."""
        if device not in self._contexts:
            context = _pointer()
            self._check(
                self._library.cuDevicePrimaryCtxRetain(context, self._handle(device)), f"device {device} has no context"
            )
            self._contexts[device] = context.value
        self._check(
            self._library.cuCtxPushCurrent_v2(self._contexts[device]), f"device {device} cannot be made current"
        )
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(_pointer())

    def load(self, image: bytes) -> int | None:
        """Load a cubin in the current context, and return the module."""
        module = _pointer()
        self._check(self._library.cuModuleLoadData(module, image), "the compiled kernels were not loaded")
        return module.value

    def function(self, modules: Sequence[int | None], name: str) -> int:
        """Return the function ``name`` of the module that has it."""
        function = _pointer()
        status = _NOT_FOUND
        for module in modules:
            status = self._library.cuModuleGetFunction(function, module, name.encode())
            if status != _NOT_FOUND:
                break
        self._check(status, f"{name} was not loaded")
        assert function.value
        return function.value

    def allow_shared(self, function: int, shared_bytes: int) -> None:
        """Allow launches of a function with ``shared_bytes`` of shared memory."""
        self._check(
            self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            f"a kernel does not get {shared_bytes} bytes of shared memory",
        )

    def launch(
        self,
        function: int,
        name: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        params: ctypes.Structure,
        stream: int,
    ) -> None:
        """Put a grid of ``grid[0]`` times ``grid[1]`` blocks of ``threads`` on a stream of the current context.

        ``params``, the one parameter, goes by value.
        """
        arguments = (_pointer * 1)(ctypes.addressof(params))
        self._check(
            self._library.cuLaunchKernel(function, *grid, 1, threads, 1, 1, shared_bytes, stream, arguments, None),
            f"{name} was not started",
        )
