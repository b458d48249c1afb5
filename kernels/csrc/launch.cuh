// From XLA to a kernel, through its foreign function interface: the addresses of all arrays, arguments first.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int MOST_SHARED = 227 * 1024;  // bytes that a block may ask for

template <class... Parameters, class... Numbers>
ffi::Error launch(
    void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
    ffi::RemainingArgs arguments, ffi::RemainingRets results, Numbers... numbers
) {
    std::vector<void*> arrays;
    for (size_t i = 0; i < arguments.size(); ++i) arrays.push_back(arguments.get<ffi::AnyBuffer>(i)->untyped_data());
    for (size_t i = 0; i < results.size(); ++i) arrays.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
    if (arrays.size() + sizeof...(Numbers) != sizeof...(Parameters))
        return ffi::Error::InvalidArgument("the kernel takes another number of arrays");
    std::vector<void*> parameters;
    for (void*& array : arrays) parameters.push_back(&array);
    (parameters.push_back(&numbers), ...);
    auto function = reinterpret_cast<const void*>(kernel);
    cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) error = cudaLaunchKernel(function, grid, threads, parameters.data(), shared_bytes, stream);
    return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

// The function of this name that XLA may call. `clusters`, those of a run, and further numbers that the kernel takes are
// given in terms of `runs`, `tasks` and `size`: the first two and the last axis of the first result.
#define HANDLER(name, kernel, clusters, ...)                                                                        \
    static_assert(SHARED_BYTES <= MOST_SHARED, "too large a problem for shared memory");                            \
    static ffi::Error launch_##kernel(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) { \
        auto shape = (*results.get<ffi::AnyBuffer>(0))->dimensions();                                               \
        [[maybe_unused]] int runs = shape[0], tasks = shape[1], size = shape.back();                                \
        dim3 grid(CLUSTER * (clusters), runs);                                                                      \
        return launch(kernel, grid, THREADS, SHARED_BYTES, stream, arguments, results, ##__VA_ARGS__);              \
    }                                                                                                               \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                  \
        name, launch_##kernel,                                                                                      \
        ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets(),                  \
        {ffi::Traits::kCmdBufferCompatible}                                                                         \
    );
