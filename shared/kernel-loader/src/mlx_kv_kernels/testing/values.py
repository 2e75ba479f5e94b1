"""Arrays of the values that break kernels: ties, constants, NaN, infinities, denormals, numbers near the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

FAMILIES = ("normal", "ties", "constant", "signed_zeros", "nan", "inf", "denormal", "huge")

_SMALLEST_NORMAL = {mx.float32: 2.0**-126, mx.bfloat16: 2.0**-126, mx.float16: 2.0**-14}
_LARGEST = {mx.float32: 3.4028234e38, mx.bfloat16: 3.3895314e38, mx.float16: 65504.0}


def array(family: str, seed: int, shape: Sequence[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    """One array of a family of FAMILIES; integer dtypes have no families and are uniform over their range."""
    rng = np.random.default_rng(seed)
    if dtype not in _LARGEST:
        return _integers(rng, shape, dtype)
    x = rng.standard_normal(shape)
    if family == "ties":
        x = rng.integers(-2, 3, shape).astype(np.float64)
    elif family == "constant":
        x = np.full(shape, x.flat[0] if x.size else 0.0)
    elif family == "signed_zeros":
        x = np.where(rng.random(shape) < 0.7, rng.choice([0.0, -0.0], shape), x)
    elif family == "nan":
        x = np.where(rng.random(shape) < 0.3, np.nan, x)
    elif family == "inf":
        x = np.where(rng.random(shape) < 0.5, rng.choice([np.inf, -np.inf], shape), x)
    elif family == "denormal":
        x = rng.uniform(-1, 1, shape) * _SMALLEST_NORMAL[dtype]
    elif family == "huge":
        x = rng.choice([-1, 1], shape) * rng.uniform(0.5, 1, shape) * _LARGEST[dtype]
    elif family != "normal":
        raise ValueError(f"[testing] expected family one of {', '.join(FAMILIES)}, got {family!r}")
    return _floats(x, dtype)


def arrays(
    shape: Sequence[int], dtype: mx.Dtype = mx.float32, families: Sequence[str] = FAMILIES
) -> st.SearchStrategy[mx.array]:
    """A hypothesis strategy of `array`."""
    return st.builds(array, st.sampled_from(families), st.integers(0, 2**32 - 1), st.just(shape), st.just(dtype))


def _floats(x: np.ndarray[Any, Any], dtype: mx.Dtype) -> mx.array:
    """Exactly these bits on every device: no conversion runs on a GPU, which may flush denormals."""
    if dtype == mx.float16:
        return mx.array(x.astype(np.float16))
    single = x.astype(np.float32)
    if dtype == mx.float32:
        return mx.array(single)
    return mx.array((single.view(np.uint32) >> 16).astype(np.uint16)).view(mx.bfloat16)


def _integers(rng: np.random.Generator, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bool_:
        return mx.array(rng.integers(0, 2, shape).astype(bool))
    numpy_dtype = np.dtype(str(dtype).removeprefix("mlx.core."))
    limits = np.iinfo(numpy_dtype)
    return mx.array(rng.integers(limits.min, limits.max, shape, dtype=numpy_dtype, endpoint=True))
