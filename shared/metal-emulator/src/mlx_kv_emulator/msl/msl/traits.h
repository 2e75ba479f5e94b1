#pragma once

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;

template <bool b, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool b, class A, class B>
using conditional_t = typename conditional<b, A, B>::type;

template <class T>
struct remove_cv {
  using type = __remove_cv(T);
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
struct remove_reference {
  using type = __remove_reference_t(T);
};
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
using remove_addrspace_t = T;
template <class T>
struct add_const {
  using type = const T;
};
template <class T>
T&& declval();

#define MSL_TRAIT(name, ...)                    \
  template <class T>                            \
  inline constexpr bool name##_v = __VA_ARGS__; \
  template <class T>                            \
  struct name : bool_constant<name##_v<T>> {};
template <class A, class B>
inline constexpr bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same : bool_constant<is_same_v<A, B>> {};
template <class A, class B>
inline constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B>
struct is_convertible : bool_constant<is_convertible_v<A, B>> {};
MSL_TRAIT(is_floating_point,
          is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> || is_same_v<remove_cv_t<T>, bfloat>)
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
MSL_TRAIT(is_signed, is_arithmetic_v<T>&& T(-1) < T(0))
MSL_TRAIT(is_unsigned, is_integral_v<T> && !(T(-1) < T(0)))
MSL_TRAIT(is_void, __is_void(T))
MSL_TRAIT(is_class, __is_class(T))
#undef MSL_TRAIT

template <class T, unsigned long N>
struct array {
  T elements[N];
  METAL_FUNC T& operator[](unsigned long i) { return elements[i]; }
  METAL_FUNC constexpr const T& operator[](unsigned long i) const { return elements[i]; }
  constexpr unsigned long size() const { return N; }
};

}  // namespace metal
