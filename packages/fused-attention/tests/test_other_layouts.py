"""A layout that this package has never heard of: 4-bit indices into a codebook, and a norm for each row."""

import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.layout import Format, Layout, extent
from mlx_kv_fused_attention import attend
from mlx_kv_kernels.testing import legs

TEXT = """
template <typename T, int DIM> struct CodebookRows {
    static constexpr constant int WORDS = DIM / 8;
    static constexpr constant bool ROW_FACTORS = true;
    static constexpr constant float UNIT = 1.0f;
    const device uint* codes;
    const device float* norms;
    const device float* codebook;
    template <int N> struct Row {
        RunOfCodes<4, N, WORDS> codes;
        float norm;
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        r.codes.load(codes + row * WORDS, first);
        r.norm = norms[row];
    }
    template <int N> METAL_FUNC void read(thread const Row<N>& r, int first, thread float (&x)[N]) const {
        for (int j = 0; j < N; j++) x[j] = first + j < DIM ? codebook[r.codes.get(first, j)] * r.norm : 0.0f;
    }
    METAL_FUNC CodebookRows from(int row, int = 0) const {
        return CodebookRows{codes + long(row) * WORDS, norms + row, codebook};
    }
    METAL_FUNC const device uint* words(int row) const { return codes + row * WORDS; }
    METAL_FUNC half2 fragment(uint units, int code) const {
        return pack_half2(codebook[(units >> (4 * code)) & 15u], codebook[(units >> (16 + 4 * code)) & 15u]);
    }
    static METAL_FUNC float weight(int) { return 1.0f; }
    METAL_FUNC float factor(int row) const { return norms[row]; }
    template <int N> struct Fold {
        METAL_FUNC float2 scale(int) const { return float2{1.0f, 1.0f}; }
        METAL_FUNC float2 minimum(int) const { return float2{0.0f, 0.0f}; }
    };
    template <int N> METAL_FUNC void fold(int, thread Fold<N>&) const {}
    template <int N> struct Scales {
        float norm;
        METAL_FUNC float scale(int) const { return norm; }
        METAL_FUNC float minimum(int) const { return 0.0f; }
    };
    template <int STEP, int N> METAL_FUNC void scales(int row, thread Scales<N>& s) const { s.norm = norms[row]; }
};
// --- body ---
    const long before = long(kv_head) * place[0];
    using Keys_ = CodebookRows<T, KEY_DIM>;
    using Values_ = CodebookRows<T, VALUE_DIM>;
    const Keys_ keys = {key_codes + before * Keys_::WORDS, key_norms + before, codebook};
    const Values_ values = {value_codes + before * Values_::WORDS, value_norms + before, codebook};
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "codebook_of_a_test").mkdir()
    (tmp_path / "codebook_of_a_test" / "__init__.py").touch()
    (tmp_path / "codebook_of_a_test" / "rows.metal").write_text(TEXT)
    yield ("codebook_of_a_test", "rows.metal")
    sys.modules.pop("codebook_of_a_test", None)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_codebook_layout(tools, source, dtype):
    rows, heads, dim = 150, 2, 64
    rng = np.random.default_rng(0)
    codebook = np.sort(rng.standard_normal(16)).astype(np.float16).astype(np.float32)
    arrays, sides = [], []
    for _ in range(2):
        codes = rng.integers(0, 16, (heads, rows, dim // 8, 8))
        norms = np.exp(rng.standard_normal((heads, rows))).astype(np.float32)
        words = (codes.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(-1).astype(np.uint32)
        arrays += [mx.array(words), mx.array(norms)]
        sides.append(codebook.astype(np.float64)[codes.reshape(heads, rows, dim)] * norms[..., None])
    inputs = ("key_codes", "key_norms", "value_codes", "value_norms", "codebook")
    format = Format(
        "codebook",
        (source,),
        heads,
        dim,
        dim,
        dtype,
        inputs,
        places=1,
        tile_rows=32,
        key_bits=4,
        value_bits=4,
        group_size=dim,
    )
    layout = Layout(format, (*arrays, mx.array(codebook)), extent((rows,), ((rows,),), ((0, 128),)), lambda: None)
    queries = tools.queries(1, 2 * heads, dim, dtype)

    keys, values = sides
    q = tools.numbers(queries)[0, :, 0].reshape(heads, 2, dim)
    scores = 0.1 * np.einsum("hgd,hrd->hgr", q, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    truth = np.einsum("hgr,hrd->hgd", weights / weights.sum(-1, keepdims=True), values).reshape(1, 4, 1, dim)
    for leg in legs():
        with leg.active():
            output = attend(queries, layout, 0.1, backend=leg.backend)
            assert tools.error(output, truth) < (1e-5 if dtype == mx.float32 else 2e-3), f"{leg}"
