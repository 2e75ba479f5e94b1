"""The plugin, in a pytest of its own process."""

import pytest

LIBRARY = """
import mlx.core as mx

double = mx.fast.metal_kernel(
    name="double", input_names=["x"], output_names=["o"],
    source="uint i = thread_position_in_grid.x;\\no[i] = x[i + SHIFT] * 2;",
)

def run(shift=0):
    if not mx.metal.is_available():
        raise RuntimeError("no GPU")
    return double(inputs=[mx.arange(32.0)], template=[("SHIFT", shift)], grid=(32, 1, 1), threadgroup=(32, 1, 1),
                  output_shapes=[(32,)], output_dtypes=[mx.float32])[0]
"""
TEST = """
import mlx.core as mx
import library

def test_double():
    assert mx.array_equal(library.run(), mx.arange(32.0) * 2)

def test_read_past_the_end():
    library.run(shift=1)
"""


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(library=LIBRARY, test_library=TEST)
    pytester.makeconftest("import library")  # kernels made before the tests are collected
    pytester.syspathinsert()
    return pytester


@pytest.mark.parametrize("mode", ["run", "check", "strict"])
def test_library_is_emulated(suite, mode):
    result = suite.runpytest_subprocess(f"--emulate-metal={mode}")
    result.stdout.fnmatch_lines([f"Metal kernels: emulated in mode {mode}"])
    if mode == "check":
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(["*double.metal:2: bounds: read of 4 bytes at byte 128 of buffer 'x'*"])
    else:
        result.assert_outcomes(passed=2)


def test_off_without_the_option(pytester):
    pytester.makepyfile("""
import mlx.core as mx
import mlx_kv_emulator

def test_untouched():
    assert mx.fast.metal_kernel is not mlx_kv_emulator.metal_kernel
""")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_unknown_mode_is_refused(pytester):
    result = pytester.runpytest_subprocess("--emulate-metal=fast")
    result.stderr.fnmatch_lines(["*invalid choice: 'fast'*"])
