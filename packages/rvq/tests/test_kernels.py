"""RVQ's kernels on every backend that runs here: the reference's codes bit for bit, and its rows up to rounding."""

from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import UnavailableBackendError
from mlx_kv_kernels.testing import FAMILIES, Leg, array, check_case, check_parity, legs
from mlx_kv_rvq import Encoded, Rvq, RvqStore, decode, encode, launch
from mlx_kv_rvq.reference import words_of

CHECK = Leg("emulator", (("mode", "check"), ("order", 0)))


def ways(variant):
    """Every way to run a kernel; of the emulator's, the strictest alone for the larger variants."""
    return [leg for leg in legs() if variant in VARIANTS or leg == CHECK or leg.backend != "emulator"]


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    dtype: mx.Dtype
    dim: int
    bits: int
    stages: int = 1
    center: bool = False
    unbiased: bool = False

    def __str__(self):
        name = f"{str(self.dtype).removeprefix('mlx.core.')}-{self.dim}-{self.stages}x{self.bits}bit"
        return name + "-center" * self.center + "-unbiased" * self.unbiased


# Every dtype, head dim, width and number of stages, centred or not, words of a lane's own and words that lanes share.
VARIANTS = [
    Variant(mx.bfloat16, 128, 2, center=True),
    Variant(mx.float16, 64, 3, stages=2, unbiased=True),
    Variant(mx.float32, 80, 1, center=True),
]
# Larger ones, which take longer to compile.
LARGER = [
    Variant(mx.bfloat16, 96, 1, stages=3),
    Variant(mx.float16, 112, 3),
    Variant(mx.float32, 192, 2),
    Variant(mx.float16, 256, 4, center=True, unbiased=True),
]
VIEWS = {
    "as it is": lambda x: x,
    "rows of a larger buffer": lambda x: mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(3, 5), (0, 0)])[..., 3:-5, :],
    "channels of a larger buffer": lambda x: mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)])[..., 1:-2],
    "rows and channels swapped": lambda x: mx.contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS + LARGER, ids=str)


def encode_op(x, skip, variant, backend):
    v = variant
    codes, norm, mean = encode(x, v.bits, v.stages, 7, unbiased=v.unbiased, center=v.center, skip=skip, backend=backend)
    return [codes, norm] if mean is None else [codes, norm, mean]


def decode_op(codes, norm, mean, variant, backend):
    v = variant
    return decode(Encoded(codes, norm, mean), v.bits, v.stages, 7, channels=v.dim, dtype=v.dtype, backend=backend)


@st.composite
def to_encode(draw, variant):
    batch = draw(
        st.sampled_from([(), (2,), (1, 2), (2, 3)]) if not variant.center else st.sampled_from([(1, 1), (2, 2)])
    )
    rows = 128 * draw(st.integers(1, 2)) if variant.center else draw(st.integers(1, 40))
    step = 64 if variant.center else 1
    blocks = [
        array(
            draw(st.sampled_from(FAMILIES)),
            draw(st.integers(0, 999)),
            (*batch, min(step, rows), variant.dim),
            variant.dtype,
        )
        for _ in range(-(-rows // step))
    ]
    x = draw(st.sampled_from(sorted(VIEWS.items())))[1](mx.concatenate(blocks, axis=-2))
    skip = [draw(st.sampled_from([0, 4, 127])) for _ in range(batch[0])] if variant.center else []
    return {"x": x, "skip": skip, "variant": variant}


@st.composite
def to_decode(draw, variant):
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    rows = 128 * draw(st.integers(1, 2)) if variant.center else draw(st.integers(1, 40))
    view = draw(st.sampled_from(sorted(VIEWS.items())))[1]
    words = variant.stages * words_of(variant.dim, variant.bits)
    seed = draw(st.integers(0, 999))
    norm = mx.abs(array("normal", seed, (*batch, rows, 1), mx.bfloat16))
    mean = view(array("normal", seed, (*batch, rows // 128, variant.dim), variant.dtype)) if variant.center else None
    codes = view(array("integers", seed, (*batch, rows, words), mx.uint32))
    return {"codes": codes, "norm": norm, "mean": mean, "variant": variant}


@each_variant
def test_encode(variant):
    check_parity(encode_op, to_encode(variant), examples=6, on=ways(variant))


@each_variant
def test_decode(variant):
    # MLX's transform adds in another order; then both round to the dtype.
    atol = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[variant.dtype]
    check_parity(decode_op, to_decode(variant), examples=6, atol=atol, on=ways(variant))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_at_a_model_s_shape(family):
    x = array(family, 0, (2, 2, 128, 128), mx.bfloat16)
    check_case(encode_op, {"x": x, "skip": [4, 0], "variant": VARIANTS[0]})


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=str)
def test_every_byte_moves_once(emulated, variant):
    """Codes, norms and means come from one launch that reads the rows once: no indices lie in memory between."""
    import mlx_kv_emulator

    x = array("normal", 0, (1, 2, 128, variant.dim), variant.dtype)
    with mlx_kv_emulator.settings(mode="check"), mlx_kv_emulator.counters() as launches:
        outputs = encode_op(x, (), variant, "emulator")
        rows = decode_op(*outputs, *(() if variant.center else (None,)), variant, "emulator")
        mx.eval(outputs, rows)
    encoded, decoded = launches  # one launch each
    sizes = dict(zip(("codes", "norm", "mean"), (output.nbytes for output in outputs), strict=False))
    assert encoded.buffers["x"].bytes_read == encoded.buffers["x"].distinct_bytes_read == x.nbytes
    for name, nbytes in sizes.items():
        traffic = encoded.buffers[name]
        assert (traffic.bytes_written, traffic.distinct_bytes_written) == (nbytes, nbytes), name
    assert decoded.buffers["x"].bytes_written == decoded.buffers["x"].distinct_bytes_written == x.nbytes
    assert decoded.buffers["codes"].distinct_bytes_read == sizes["codes"]


def test_the_store_runs_on_the_backend_of_the_environment_variable(emulated, monkeypatch):
    import mlx_kv_emulator

    def filled(backend):
        monkeypatch.setenv("MLX_KV_BACKEND", backend)
        store = RvqStore(Rvq(residual=32))
        x = array("normal", 0, (2, 2, 160, 128), mx.bfloat16)
        store.append(x[..., :159, :], x[..., :159, :])
        store.settle()
        with mlx_kv_emulator.counters() as launches:
            store.append(x[..., 159:, :], x[..., 159:, :])
            store.settle()
            mx.eval(store.arrays())
        return store, [launch.kernel for launch in launches]

    emulated_store, launched = filled("emulator")
    assert [name.split("_")[0] for name in launched] == ["encode"] * 2  # a block of 128 keys, and 32 values
    reference_store, launched = filled("reference")
    assert launched == []
    pairs = zip(emulated_store.arrays().items(), reference_store.arrays().items(), strict=True)
    assert all(name == other and mx.array_equal(a, b).item() for (name, a), (other, b) in pairs)


def test_a_backend_asked_for_by_name_raises(emulated, monkeypatch):
    x = mx.zeros((2, 64), mx.int32)
    message = r"\[rvq\] backend 'emulator' was asked for .*expected float32, float16 or bfloat16"
    with pytest.raises(UnavailableBackendError, match=message):
        encode(x, 2, backend="emulator")
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    with pytest.raises(UnavailableBackendError, match=message):
        encode(x, 2)


def test_auto_takes_the_reference_and_says_why_once(monkeypatch, caplog):
    monkeypatch.delenv("MLX_KV_BACKEND", raising=False)
    monkeypatch.setattr(launch, "resolve_backend", lambda backend: "cuda")  # as on a machine with a GPU
    launch._log_once.cache_clear()
    x = mx.ones((2, 64), mx.int32)
    for _ in range(2):
        mx.eval(encode(x, 2)[:2])
    assert [r.message for r in caplog.records] == [
        "RVQ runs as plain MLX ops: its kernels do not take this. expected float32, float16 or bfloat16, got "
        "mlx.core.int32"
    ]
