import pytest

from mlx_kv_emulator.rewrite import kernel_parameters, mark_threadgroup_variables, to_cpp

MARK = "MSL_THREADGROUP_VARIABLE"
VARIABLES = [
    "threadgroup float x[4];",
    "threadgroup float x;",
    "threadgroup vec<float, 4> x[2][3];",
    "threadgroup metal::array<float, 2> x;",
    "threadgroup float a[4], b[4];",
    "alignas(16) threadgroup uchar raw[64];",
    "threadgroup atomic<uint> count;",
    "if (true) { threadgroup T x[N]; }",
]
QUALIFIERS = [
    "threadgroup float* p = x;",
    "const threadgroup T* p;",
    "void f(threadgroup float* p, uint i) {}",
    "float g(threadgroup float (&x)[4]) { return x[0]; }",
    "auto p = (threadgroup float*)raw;",
    "// threadgroup float x[4];",
    "/* threadgroup float x[4]; */",
    'const char* s = "threadgroup float x[4];";',
    "T get() threadgroup { return v; }",
]


@pytest.mark.parametrize("text", VARIABLES)
def test_variables_are_marked(text):
    assert mark_threadgroup_variables(text) == text.replace("threadgroup", MARK)


@pytest.mark.parametrize("text", QUALIFIERS)
def test_qualifiers_are_not(text):
    assert mark_threadgroup_variables(text) == text


def test_lines_keep_their_numbers():
    text = "threadgroup\nfloat\nx[4]; // a\n/* b\n */ y();\n#pragma METAL fp contract(off)\n"
    assert to_cpp(text).count("\n") == text.count("\n")


def test_function_constants():
    text = "constant bool causal [[function_constant(3)]]; constant int blocks [[function_constant(4)]];"
    got = to_cpp(text, {"causal": True})
    assert "constexpr bool causal = true; static constexpr bool causal_defined = true;" in got
    assert "constexpr int blocks = 0; static constexpr bool blocks_defined = false;" in got


def test_parameters_of_a_kernel():
    text = (
        "template <typename T> [[kernel]] void f(\n"
        "  const device T* x [[buffer(0)]], // a, b\n"
        "  metal::pair<int, T> y) {\n}"
    )
    assert kernel_parameters(text, "f") == ["const device T* x [[buffer(0)]]", "metal::pair<int, T> y"]
