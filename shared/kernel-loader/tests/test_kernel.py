from pathlib import Path

import mlx.core as mx
import pytest

from mlx_kv_kernels import Kernel, kernel, source
from mlx_kv_kernels.launch import Launch, launches
from mlx_kv_kernels.testing import Mutant, legs, mutated

MULTIPLY = """// One helper, so that the body does not begin on line 1.
METAL_FUNC float times(float a, int b) { return a * float(b); }
// --- body ---
    const uint i = thread_position_in_grid.x;
    out[i] = times(x[i], FACTOR);
"""


@pytest.fixture(params=legs(), ids=str)
def leg(request):
    with request.param.active():
        yield request.param


def launch(kernel, x, backend, **template):
    out = kernel(
        inputs=[x],
        template=template,
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        backend=backend,
    )[0]
    mx.eval(out)
    return out


def test_template_variants_and_edited_sources_of_one_name_in_one_evaluation(leg, write_kernel):
    x = mx.arange(64, dtype=mx.float32)
    by_template = write_kernel("multiply", MULTIPLY, ["x"], ["out"], template=("FACTOR",))
    edited = write_kernel("multiply", MULTIPLY.replace("a * ", "a + "), ["x"], ["out"], template=("FACTOR",))
    outputs = [
        k(
            inputs=[x],
            template={"FACTOR": factor},
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
            backend=leg.backend,
        )[0]
        for k, factor in [(by_template, 2), (by_template, 3), (edited, 2), (by_template, 5)]
    ]
    mx.eval(outputs)
    for got, expected in zip(outputs, [x * 2, x * 3, x + 2, x * 5], strict=True):
        assert mx.array_equal(got, expected)


def test_one_name_serves_inputs_of_several_dtypes_and_address_spaces(leg, write_kernel):
    """Neither the template nor the text says what differs here; MLX's own key would hold the first one's code."""
    text = "// --- body ---\n    const uint i = thread_position_in_grid.x;\n    out[i] = float(x[i % 4]);\n"
    widen = write_kernel("widen", text, ["x"], ["out"])
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.int32):
        for size in (4, 32):  # constant and device memory on Metal
            x = mx.arange(size).astype(dtype)
            got = widen(
                inputs=[x],
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(32,)],
                output_dtypes=[mx.float32],
                backend=leg.backend,
            )[0]
            assert mx.array_equal(got, mx.tile(mx.arange(4, dtype=mx.float32), 8))


def test_each_variant_is_built_once(write_kernel, monkeypatch):
    built = []

    def metal_kernel(**description):
        built.append(description)
        return lambda **call: [mx.zeros(call["output_shapes"][0])]

    monkeypatch.setattr(kernel, "resolve_backend", lambda _: "metal")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    multiply = write_kernel("multiply", MULTIPLY, ["x"], ["out"], template=("FACTOR",))
    for factor in (2, 3, 2, 2, 3):
        launch(multiply, mx.zeros((64,)), "metal", FACTOR=factor)
    assert len(built) == len({description["name"] for description in built}) == 2
    assert all(description["name"].startswith("multiply_") for description in built)


def test_cuda_is_given_files_of_prelude_positions_launch_bounds_and_text(write_kernel, monkeypatch):
    built = []

    def cuda_kernel(**description):
        built.append(description)
        return lambda **call: [mx.zeros(call["output_shapes"][0])]

    monkeypatch.setattr(kernel, "resolve_backend", lambda _: "cuda")
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    text = MULTIPLY.replace("FACTOR)", "FACTOR + 0 * x_shape[0])")
    multiply = write_kernel("multiply", text, ["x"], ["out"], template=("FACTOR",))
    launch(multiply, mx.zeros((64,)), "cuda", FACTOR=2)
    *mentioned, included = built[0]["source"].splitlines()
    assert mentioned == ["// x_shape"]  # without strides and ndim: MLX hands over what a body names, and no more
    header, body = (Path(line.split('"')[1]).read_text() for line in (built[0]["header"], included))
    assert "#define device\n" in header
    assert "__launch_bounds__(32)" in header
    assert "thread_position_in_grid" in body
    assert header.endswith(text.split("// --- body ---")[0])
    assert body.endswith(text.split("// --- body ---\n")[1])


@pytest.mark.parametrize(
    ("old", "new", "line"), [("float(b)", "float(missing)", 2), ("times(x[i], FACTOR)", "missing", 5)]
)
def test_a_compile_error_names_the_metal_line(leg, write_kernel, old, new, line):
    broken = write_kernel("broken", MULTIPLY.replace(old, new), ["x"], ["out"], template=("FACTOR",))
    with pytest.raises(Exception, match=rf"broken\.metal[:(]{line}\b[\s\S]*missing"):
        launch(broken, mx.zeros((64,)), leg.backend, FACTOR=2)


def test_init_value_fills_what_the_kernel_leaves(leg, write_kernel):
    text = "// --- body ---\n    const uint i = thread_position_in_grid.x;\n    if (i % 2 == 0) out[i] = x[i];\n"
    evens = write_kernel("evens", text, ["x"], ["out"])
    got = evens(
        inputs=[mx.arange(32, dtype=mx.float32)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
        init_value=-1,
        backend=leg.backend,
    )[0]
    assert got.tolist() == [float(i) if i % 2 == 0 else -1.0 for i in range(32)]


def test_a_launch_is_kept_until_texts_change(leg, write_kernel):
    text = "// --- body ---\n    const uint i = thread_position_in_grid.x;\n    out[i] = x[i] + 1;\n"
    kernel, x, prepared = write_kernel("add_one", text, ["x"], ["out"]), mx.arange(32, dtype=mx.float32), []

    @launches
    def adder(shape, dtype):
        prepared.append(shape)
        return kernel.prepare(
            inputs=[(dtype, shape)],
            grid=(*shape, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
            backend=leg.backend,
        )

    def add(x):
        return adder(x.shape, x.dtype)([x])[0].tolist()

    for _ in range(3):
        assert add(x) == list(range(1, 33))
    assert add(mx.concatenate([x, x])) == [*range(1, 33)] * 2
    assert prepared == [(32,), (64,)]
    with mutated(kernel, Mutant("+ 1", "+ 2")):
        assert add(x) == list(range(2, 34))
    assert add(x) == list(range(1, 33))
    assert prepared == [(32,), (64,), (32,), (32,)]


@pytest.mark.parametrize(("compiles", "traced"), [(True, 2), (False, 4)])
def test_a_launch_is_compiled_at_its_second_call(compiles, traced):
    calls = []

    def doubled(arrays):
        calls.append(arrays)
        return [2 * arrays[0]]

    launch = Launch(doubled, compiles)
    for i in range(4):
        assert launch([mx.array([float(i)])])[0].item() == 2 * i
    assert len(calls) == traced


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (100, 1, 1)}, r"expected grid a positive multiple of threadgroup \(32, 1, 1\), got \(100, 1, 1\)"),
        ({"grid": (0, 1, 1)}, "expected grid a positive multiple"),
        ({"threadgroup": (16, 1, 1), "grid": (64, 1, 1)}, "expected a threadgroup of a multiple of 32 threads"),
        ({"threadgroup": (64, 32, 1), "grid": (64, 32, 1)}, "up to 1024"),
        ({"template": {}}, r"expected template \['FACTOR'\], got \[\]"),
        ({"template": {"FACTOR": 1, "OTHER": 2}}, "expected template"),
        ({"template": {"FACTOR": -2}}, "expected template integers of 0 or more"),
        ({"inputs": []}, "expected inputs x, got 0 arrays"),
        ({"backend": "reference"}, "expected a backend that runs kernels"),
    ],
)
def test_refuses_before_anything_is_built(change, message):
    call = {
        "inputs": [mx.zeros((64,))],
        "template": {"FACTOR": 2},
        "grid": (64, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
        "backend": "reference",
    }
    with pytest.raises(ValueError, match=r"\[multiply\] .*" + message):
        Kernel("multiply", "nowhere", ("x",), ("out",), template=("FACTOR",))(**{**call, **change})


def test_a_file_without_the_body_marker_is_refused():
    with pytest.raises(ValueError, match=r"\[lost\.metal\] expected one line '// --- body ---', got 0"):
        source.split("out[0] = 1;", "lost.metal")


@pytest.mark.parametrize(
    "pointer",
    [
        "threadgroup float* p = shared;",
        "f((threadgroup const uint *)shared);",
        "threadgroup vec<float, 4>* p = 0;",
    ],
)
def test_pointers_that_cuda_has_no_type_for_are_refused_everywhere(pointer):
    text = f"// --- body ---\n    threadgroup float shared[32];\n    {pointer}\n"
    with pytest.raises(ValueError, match=r"\[k.metal\] expected pointers to threadgroup memory that are `auto`"):
        source.compose(text, "k.metal", "metal")


def test_helpers_stand_before_a_kernel_and_leave_every_file_its_lines(leg, write_kernel):
    kernel = write_kernel("multiply", "// nothing but\n// --- body ---\n    out[0] = 1;\n", ["x"], ["out"])
    folder = Path(source.files(kernel.package).joinpath("kernels"))
    (folder / "times.metal").write_text(MULTIPLY.partition("// --- body ---")[0])
    (folder / "product.metal").write_text("// --- body ---" + MULTIPLY.partition("// --- body ---")[2])
    product = Kernel("product", kernel.package, ("x",), ("out",), template=("FACTOR",), helpers=("times",))
    assert launch(product, mx.arange(32, dtype=mx.float32), leg.backend, FACTOR=3).tolist() == list(range(0, 96, 3))
    lines = product.text.splitlines()
    assert (
        lines.index('#line 1 "times.metal"') < lines.index('#line 1 "product.metal"') < lines.index("// --- body ---")
    )
    assert lines[lines.index("    const uint i = thread_position_in_grid.x;") - 1] == '#line 2 "product.metal"'
