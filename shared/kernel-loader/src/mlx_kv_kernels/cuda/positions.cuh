// Metal's position attributes as locals of the kernel. Grids are whole threadgroups and threadgroups whole simdgroups (Kernel
// refuses others), so positions never run past the grid.
[[maybe_unused]] const uint3 threads_per_threadgroup = make_uint3(blockDim.x, blockDim.y, blockDim.z);
[[maybe_unused]] const uint3 threadgroups_per_grid = make_uint3(gridDim.x, gridDim.y, gridDim.z);
[[maybe_unused]] const uint3 threads_per_grid =
    make_uint3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z);
[[maybe_unused]] const uint3 threadgroup_position_in_grid = make_uint3(blockIdx.x, blockIdx.y, blockIdx.z);
[[maybe_unused]] const uint threads_per_simdgroup = 32;
[[maybe_unused]] const uint simdgroups_per_threadgroup = blockDim.x * blockDim.y * blockDim.z / 32;
[[maybe_unused]] const uint thread_index_in_simdgroup = metal::this_lane();
[[maybe_unused]] const uint simdgroup_index_in_threadgroup =
    (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
[[maybe_unused]] const uint thread_index_in_threadgroup = simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup;
[[maybe_unused]] const uint3 thread_position_in_threadgroup = make_uint3(
    thread_index_in_threadgroup % blockDim.x, thread_index_in_threadgroup / blockDim.x % blockDim.y,
    thread_index_in_threadgroup / blockDim.x / blockDim.y);
[[maybe_unused]] const uint3 thread_position_in_grid = make_uint3(
    blockIdx.x * blockDim.x + thread_position_in_threadgroup.x, blockIdx.y * blockDim.y + thread_position_in_threadgroup.y,
    blockIdx.z * blockDim.z + thread_position_in_threadgroup.z);
