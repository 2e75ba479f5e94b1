"""KIVI's kernels on every backend that runs here: the reference's bits, and a float64 oracle's."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import UnavailableBackendError, resolve_backend
from mlx_kv_kernels.testing import FAMILIES, Leg, array, check_case, check_parity
from mlx_kv_kivi import (
    Kivi,
    KiviStore,
    Quantized,
    dequantize_keys,
    dequantize_values,
    launch,
    quantize_keys,
    quantize_values,
)

# Every dtype, every width and every group size of a store, in few combinations, since each is compiled.
VARIANTS = [
    (mx.float32, 2, 32),
    (mx.float32, 3, 64),
    (mx.float32, 4, 128),
    (mx.float16, 2, 64),
    (mx.float16, 8, 32),
    (mx.bfloat16, 2, 128),
    (mx.bfloat16, 4, 32),
]
# The group size that only the functions take.
RARE = [(mx.float16, 2, 256)]
CHECK = Leg("emulator", (("mode", "check"), ("order", 0)))


def name_of(variant):
    dtype, bits, group_size = variant
    return f"{str(dtype).removeprefix('mlx.core.')}-{bits}bit-group{group_size}"


def each_variant(variants=VARIANTS):
    return pytest.mark.parametrize("variant", variants, ids=name_of)


@pytest.fixture
def emulated():
    """Skips a test that only the emulator can run, where it cannot."""
    try:
        resolve_backend("emulator")
    except UnavailableBackendError as error:
        pytest.skip(str(error))


# ---- the float64 oracle: exact operations, rounded where the specification rounds


def rounded(x, dtype):
    """The nearest number of the dtype, ties to even, as float64."""
    single = x.astype(np.float32)
    if dtype == mx.float16:
        return single.astype(np.float16).astype(np.float64)
    if dtype == mx.bfloat16:
        bits = single.view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        single = np.where(np.isfinite(single), nearest, single)
    return single.astype(np.float64)


def packed(codes, bits):
    stream = (codes[..., None].astype(np.uint32) >> np.arange(bits) & 1).astype(np.uint8)
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little").view(np.uint32)


def unpacked(words, bits):
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return (stream.reshape(*words.shape[:-1], -1, bits) << np.arange(bits)).sum(-1)


def in_groups(x, side, group_size):
    """Groups along the axis that is returned."""
    *batch, rows, channels = x.shape
    if side == "keys":
        return x.reshape(*batch, rows // group_size, group_size, channels), -2
    return x.reshape(*batch, rows, channels // group_size, group_size), -1


def quantize_oracle(side):
    def oracle(x, dtype, bits, group_size):
        groups, axis = in_groups(x, side, group_size)
        with np.errstate(all="ignore"):
            low = groups.min(axis, keepdims=True)
            span = rounded(groups.max(axis, keepdims=True) - low, mx.float32)
            finite = np.isfinite(groups).all(axis, keepdims=True) & (span < 2.0**100)
            scale = rounded(rounded(span / (2**bits - 1), mx.float32), dtype)
            scale = np.where(finite & (scale >= 2.0**-80), scale, 1.0)
            minimum = np.where(finite, np.where(abs(low) < 2.0**-126, 0.0, low), np.nan)
            quotient = rounded(rounded(groups - minimum, mx.float32) / scale, mx.float32)
            codes = np.where(finite, np.rint(np.clip(quotient, 0, 2**bits - 1)), 0)
        return packed(codes.reshape(x.shape), bits), scale.squeeze(axis), minimum.squeeze(axis)

    return oracle


def dequantize_oracle(side):
    def oracle(codes, scale, minimum, dtype, bits, group_size):
        groups, axis = in_groups(unpacked(codes, bits), side, group_size)
        with np.errstate(all="ignore"):
            product = rounded(groups * np.expand_dims(scale, axis), mx.float32)
            x = rounded(rounded(product + np.expand_dims(minimum, axis), mx.float32), dtype)
        return x.reshape(*codes.shape[:-1], -1)

    return oracle


# ---- the public functions, with the arguments that the oracles take


def quantize(side):
    function = {"keys": quantize_keys, "values": quantize_values}[side]
    return lambda x, dtype, bits, group_size, backend: function(x, bits, group_size, backend=backend)


def dequantize(side):
    function = {"keys": dequantize_keys, "values": dequantize_values}[side]

    def op(codes, scale, minimum, dtype, bits, group_size, backend):
        return function(Quantized(codes, scale, minimum), bits, group_size, backend=backend)

    return op


# ---- drawn arguments

VIEWS = {
    "as it is": lambda x: x,
    "rows of a larger buffer": lambda x: mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(3, 5), (0, 0)])[..., 3:-5, :],
    "channels of a larger buffer": lambda x: mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)])[..., 1:-2],
    "rows and channels swapped": lambda x: mx.contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2),
}


@st.composite
def shapes(draw, side, bits, group_size):
    """Batch axes, rows, channels, such that groups are whole and the codes of a row fill words."""
    batch = draw(st.sampled_from([(), (2,), (1, 2), (2, 3), (2, 1, 2)]))
    fitting = max(8, {2: 16, 3: 32, 4: 8, 8: 4}[bits])
    if side == "keys":
        return batch, group_size * draw(st.integers(1, 3)), fitting * draw(st.integers(1, 5 if bits != 3 else 3))
    return batch, draw(st.integers(1, 9)), max(group_size, fitting) * draw(st.integers(1, 2))


@st.composite
def floats(draw, batch, rows, channels, dtype, families=FAMILIES, step=1):
    """Rows of changing families, `step` rows each."""
    blocks = [
        array(draw(st.sampled_from(families)), draw(st.integers(0, 2**32 - 1)), (*batch, step, channels), dtype)
        for _ in range(rows // step)
    ]
    return draw(st.sampled_from(sorted(VIEWS.items())))[1](mx.concatenate(blocks, axis=-2))


@st.composite
def to_quantize(draw, side, variant):
    dtype, bits, group_size = variant
    batch, rows, channels = draw(shapes(side, bits, group_size))
    step = group_size if side == "keys" else 1
    x = draw(floats(batch, rows, channels, dtype, step=step))
    return {"x": x, "dtype": dtype, "bits": bits, "group_size": group_size}


@st.composite
def to_dequantize(draw, side, variant):
    dtype, bits, group_size = variant
    batch, rows, channels = draw(shapes(side, bits, group_size))
    words = draw(st.sampled_from(sorted(VIEWS.items())))[1](
        array("integers", draw(st.integers(0, 999)), (*batch, rows, channels * bits // 32), mx.uint32)
    )
    if side == "keys":
        rows //= group_size
    else:
        channels //= group_size
    # No scale or minimum that quantisation stores is a denormal float32, which GPUs may flush.
    families = [f for f in FAMILIES if f != "denormal" or dtype == mx.float16]
    scale, minimum = (draw(floats(batch, rows, channels, dtype, families)) for _ in range(2))
    return {
        "codes": words,
        "scale": scale,
        "minimum": minimum,
        "dtype": dtype,
        "bits": bits,
        "group_size": group_size,
    }


# ---- parity


@each_variant()
@pytest.mark.parametrize("side", ["keys", "values"])
def test_quantize(side, variant):
    check_parity(quantize(side), to_quantize(side, variant), oracle=quantize_oracle(side), examples=8)


@each_variant()
@pytest.mark.parametrize("side", ["keys", "values"])
def test_dequantize(side, variant):
    check_parity(dequantize(side), to_dequantize(side, variant), oracle=dequantize_oracle(side), examples=8)


@each_variant(RARE)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_largest_group_size(emulated, side, variant):
    check_parity(quantize(side), to_quantize(side, variant), oracle=quantize_oracle(side), examples=4, on=[CHECK])
    check_parity(dequantize(side), to_dequantize(side, variant), oracle=dequantize_oracle(side), examples=4, on=[CHECK])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_families_at_a_model_s_shape(side, family):
    x = array(family, 0, (1, 2, 128, 128), mx.bfloat16)
    case = {"x": x, "dtype": mx.bfloat16, "bits": 2, "group_size": 128}
    check_case(quantize(side), case, oracle=quantize_oracle(side))


@each_variant([v for v in VARIANTS if v[1] == 4])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_quotients_at_the_borders_of_rounding(side, variant):
    """Every scale of a binade of bfloat16 (float16, for the others), and distances of half a code, or nearly."""
    dtype, bits, group_size = variant
    scales = 1 + np.arange(128) / 128 if dtype == mx.bfloat16 else 1 + np.arange(1024) / 1024
    steps = np.concatenate([[0, 15], np.arange(15) + 0.5, np.arange(15) + 0.5])
    groups = np.tile(scales[:, None] * steps, group_size // 32).astype(np.float32)
    x = mx.array(groups.T if side == "keys" else groups).astype(dtype)
    check_case(
        quantize(side),
        {"x": x, "dtype": dtype, "bits": bits, "group_size": group_size},
        oracle=quantize_oracle(side),
    )


@each_variant([v for v in VARIANTS if v[1] == 2])
def test_numbers_at_the_limits(variant):
    """Just within and just beyond what the specification says of tiny, subnormal and huge groups."""
    dtype, bits, group_size = variant
    tiny, normal, limit = 3 * 2.0**-80, 2.0**-126, 2.0**100
    pairs = [
        (0, tiny),
        (0, tiny * (1 - 2.0**-7)),
        (normal, 1),
        (-normal / 2, 1),
        (-normal / 2, normal / 2),
        (-limit / 2, limit / 2),
        (-limit / 2, limit * (1 / 2 - 2.0**-8)),
        (0, 65504),
        (-65504, 65504),
        (0, 3 * 2.0**-25),
        (0, 2.0**-24),
        (-0.0, 0),
    ]
    single = np.tile(np.array(pairs, dtype=np.float32), (1, group_size // 2))  # a group for each pair

    def of_dtype(x):  # bits, so that no device flushes a denormal on the way
        if dtype == mx.bfloat16:
            return mx.array((x.view(np.uint32) >> 16).astype(np.uint16)).view(dtype)
        with np.errstate(over="ignore"):
            return mx.array(x.astype(np.float16) if dtype == mx.float16 else x)

    for side, x in (("values", single), ("keys", np.tile(single.T, (1, 4)))):
        case = {"x": of_dtype(np.ascontiguousarray(x)), "dtype": dtype, "bits": bits, "group_size": group_size}
        check_case(quantize(side), case, oracle=quantize_oracle(side))


def test_fewer_words_than_metal_keeps_in_device_memory():
    words = mx.array([[[[0x1B, 0xFFFFFFFF]]]], dtype=mx.uint32)
    one = mx.array([[[[2.0]]]])
    case = {"codes": words, "scale": one, "minimum": one, "dtype": mx.float32, "bits": 2, "group_size": 32}
    check_case(dequantize("values"), case, oracle=dequantize_oracle("values"))


# ---- cost


@pytest.mark.parametrize("variant", [VARIANTS[5], VARIANTS[1], VARIANTS[4]], ids=name_of)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("shape", [(1, 2, 128, 128), (2, 1, 384, 384)], ids=str)
def test_every_byte_moves_once(emulated, side, variant, shape):
    import mlx_kv_emulator

    dtype, bits, group_size = variant
    x = array("normal", 0, shape, dtype)
    arguments = {"dtype": dtype, "bits": bits, "group_size": group_size, "backend": "emulator"}
    with mlx_kv_emulator.settings(mode="check"), mlx_kv_emulator.counters() as launches:
        codes, scale, minimum = quantize(side)(x, **arguments)
        dequantize(side)(codes, scale, minimum, **arguments)
    quantized, dequantized = launches  # one launch each
    moved = {"x": x.nbytes, "codes": codes.nbytes, "scale": scale.nbytes, "minimum": minimum.nbytes}
    for launched, inputs in ((quantized, {"x"}), (dequantized, {"codes", "scale", "minimum"})):
        for buffer, nbytes in moved.items():
            traffic = launched.buffers[buffer]
            read, written = (nbytes, 0) if buffer in inputs else (0, nbytes)
            assert (traffic.bytes_read, traffic.distinct_bytes_read) == (read, read), (launched.kernel, buffer)
            assert (traffic.bytes_written, traffic.distinct_bytes_written) == (written, written), buffer


def test_the_store_runs_on_the_backend_of_the_environment_variable(emulated, monkeypatch):
    import mlx_kv_emulator

    def filled(backend):
        monkeypatch.setenv("MLX_KV_BACKEND", backend)
        store = KiviStore(Kivi(bits=2, group_size=32, residual=32))
        x = array("normal", 0, (2, 2, 70, 64), mx.bfloat16)
        store.append(x[..., :69, :], x[..., :69, :])
        store.settle()
        with mlx_kv_emulator.counters() as launches:
            store.append(x[..., 69:, :], x[..., 69:, :])
            store.settle()
        return store, [launch.kernel for launch in launches]

    emulated_store, launched = filled("emulator")
    assert [name.split("_bfloat16")[0] for name in launched] == ["quantize_values"]  # one launch for one more token
    got = [*emulated_store.arrays().values(), *emulated_store.dense()]
    reference_store, launched = filled("reference")
    assert launched == []
    expected = [*reference_store.arrays().values(), *reference_store.dense()]
    assert len(got) == len(expected)
    assert all(mx.array_equal(a, b).item() for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
def test_single_tokens_wait_to_be_quantised_together(emulated, monkeypatch, batch):
    """And are then held as a store holds them that has taken them together."""
    import mlx_kv_emulator

    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    store, together = (KiviStore(Kivi(bits=2, group_size=32, residual=32)) for _ in range(2))
    x = array("normal", 0, (batch, 2, 250, 64), mx.float16)
    together.append(x, x)
    together.settle()
    store.append(x[..., :80, :], x[..., :80, :])
    store.settle()
    launches = []
    for n in range(80, 250):
        with mlx_kv_emulator.counters() as launched:
            store.append(x[..., n : n + 1, :], x[..., n : n + 1, :])
        launches += [launch.kernel.split("_float16")[0].rstrip("0123456789_") for launch in launched]
    assert store.rows_wait
    # Keys in blocks of 32, each with the values that have come to wait; and values alone where a tail was full.
    assert launches.count("quantize_keys") == 250 // 32 - 80 // 32
    assert launches.count("quantize_values") < 15
    store.settle()
    assert all(mx.array_equal(*pair) for pair in zip(store.dense(), together.dense(), strict=True))
    held = [
        {name: buffer.view() for name, buffer in s.buffers().items() if buffer.data is not None}
        for s in (store, together)
    ]
    assert held[0].keys() == held[1].keys()
    if batch == 1:  # what lies beyond a sequence's own rows has no meaning
        assert all(mx.array_equal(held[0][name], held[1][name]) for name in held[0])


# ---- arrays that no kernel takes

UNFIT = [
    (quantize_keys, (1, 1, 48, 64), mx.float32, 2, 48, r"expected group_size in \(32, 64"),
    (quantize_values, (1, 1, 2, 80), mx.float32, 2, 80, r"expected group_size in \(32, 64"),
    (quantize_keys, (1, 1, 32, 40), mx.float32, 3, 32, "expected channels in eights whose 3-bit codes fill"),
    (quantize_keys, (1, 1, 32, 36), mx.float32, 8, 32, "expected channels in eights"),
]


@pytest.mark.parametrize(("function", "shape", "dtype", "bits", "group_size", "message"), UNFIT)
def test_a_backend_asked_for_by_name_raises(emulated, monkeypatch, function, shape, dtype, bits, group_size, message):
    x = array("normal", 0, shape, dtype)
    with pytest.raises(UnavailableBackendError, match=r"\[kivi\] backend 'emulator' was asked for .*" + message):
        function(x, bits, group_size, backend="emulator")
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    with pytest.raises(UnavailableBackendError, match=message):
        function(x, bits, group_size)


def test_auto_takes_the_reference_and_says_why_once(monkeypatch, caplog):
    x = array("normal", 0, (1, 1, 48, 64), mx.float32)
    expected = quantize_keys(x, 2, 48, backend="reference")
    monkeypatch.delenv("MLX_KV_BACKEND", raising=False)
    monkeypatch.setattr(launch, "resolve_backend", lambda backend: "cuda")  # as on a machine with a GPU
    launch._log_once.cache_clear()
    for _ in range(2):
        assert all(mx.array_equal(a, b).item() for a, b in zip(quantize_keys(x, 2, 48), expected, strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        "KIVI runs as plain MLX ops: its kernels do not take this. expected group_size in (32, 64, 128, 256), got 48"
    ]


def test_empty_arrays_need_no_kernel(emulated):
    x = mx.zeros((1, 2, 0, 64))
    codes, scale, minimum = quantize_values(x, 2, 32, backend="emulator")
    assert (codes.shape, scale.shape, minimum.shape) == ((1, 2, 0, 4), (1, 2, 0, 2), (1, 2, 0, 2))
