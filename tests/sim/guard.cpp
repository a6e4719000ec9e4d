// torch's C++ code that indexes a tensor, or moves it, guards the tensor's device. A torch without CUDA has no guard for CUDA devices and
// refuses; this one does nothing, as torch's own for fake tensors (torch._C._ensureCUDADeviceGuardSet, which needs a torch with CUDA).
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
