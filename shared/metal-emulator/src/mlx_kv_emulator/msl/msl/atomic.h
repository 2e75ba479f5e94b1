#pragma once
// Relaxed atomics. Kernels run on one processor thread, so a read and a write make a read-modify-write.

#ifdef MSL_CHECKED
extern "C" void msl_check_atomic(void* address, unsigned size, int action, unsigned site);
#define MSL_CHECK_ATOMIC(pointer, action) \
  msl_check_atomic((void*)&(pointer)->value, sizeof((pointer)->value), action, 0)
#else
#define MSL_CHECK_ATOMIC(pointer, action) (void)0
#endif

namespace metal {

enum memory_order { memory_order_relaxed };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

template <class T>
struct _atomic {
  T value;
};
template <class T>
using atomic = _atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

}  // namespace metal

namespace msl {

enum { READ = 1, WRITE = 2 };

// Compiler atomics: the optimiser keeps them, and they are not instrumented as plain accesses.
template <class A>
METAL_FUNC auto load(A* pointer) {
  decltype(pointer->value) value;
#ifdef MSL_STRICT  // the builtins do not know address spaces
  value = pointer->value;
#else
  __atomic_load(&pointer->value, &value, __ATOMIC_RELAXED);
#endif
  return value;
}
template <class A, class T>
METAL_FUNC void store(A* pointer, T value) {
#ifdef MSL_STRICT
  pointer->value = value;
#else
  __atomic_store(&pointer->value, &value, __ATOMIC_RELAXED);
#endif
}

}  // namespace msl

namespace metal {

template <class A>
METAL_FUNC auto atomic_load_explicit(A* object, memory_order) {
  MSL_CHECK_ATOMIC(object, msl::READ);
  return msl::load(object);
}
template <class A, class U>
METAL_FUNC void atomic_store_explicit(A* object, U desired, memory_order) {
  MSL_CHECK_ATOMIC(object, msl::WRITE);
  using T = decltype(msl::load(object));
  msl::store(object, (T)desired);
}
template <class A, class E, class U>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(A* object, E* expected, U desired, memory_order, memory_order) {
  MSL_CHECK_ATOMIC(object, msl::READ | msl::WRITE);
  const auto before = msl::load(object);
  using T = decltype(msl::load(object));
  if (__builtin_memcmp(&before, expected, sizeof before) == 0) {
    msl::store(object, (T)desired);
    return true;
  }
  *expected = before;
  return false;
}

#define MSL_READ_MODIFY_WRITE(name, expression)              \
  template <class A, class U>                                \
  METAL_FUNC auto name(A* object, U operand, memory_order) { \
    MSL_CHECK_ATOMIC(object, msl::READ | msl::WRITE);        \
    const auto a = msl::load(object);                        \
    using T = decltype(msl::load(object));                   \
    const T b = (T)operand;                                  \
    msl::store(object, (T)(expression));                     \
    return a;                                                \
  }
MSL_READ_MODIFY_WRITE(atomic_exchange_explicit, b)
MSL_READ_MODIFY_WRITE(atomic_fetch_add_explicit, a + b)
MSL_READ_MODIFY_WRITE(atomic_fetch_sub_explicit, a - b)
MSL_READ_MODIFY_WRITE(atomic_fetch_or_explicit, a | b)
MSL_READ_MODIFY_WRITE(atomic_fetch_and_explicit, (a & b))
MSL_READ_MODIFY_WRITE(atomic_fetch_xor_explicit, a ^ b)
MSL_READ_MODIFY_WRITE(atomic_fetch_min_explicit, b < a ? b : a)
MSL_READ_MODIFY_WRITE(atomic_fetch_max_explicit, a < b ? b : a)
#undef MSL_READ_MODIFY_WRITE

METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

}  // namespace metal
