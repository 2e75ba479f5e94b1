#pragma once
// Messages from kernels are dropped.
namespace mlx {
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... Arguments>
  void log_debug(const char*, Arguments...) const {}
};
}  // namespace mlx
