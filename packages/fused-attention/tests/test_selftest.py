"""The selftest's cases pass wherever a backend runs, and are found through the entry point."""

from mlx_kv_fused_attention.selftest_cases import cases
from mlx_kv_kernels.selftest import collect, selftest


def test_every_case_passes():
    results = list(selftest([("fused", case) for case in cases()]))
    assert {result.status for result in results} <= {"passed", "not run"}
    assert any(result.status == "passed" for result in results)


def test_the_cases_are_found():
    assert "mlx-kv-fused-attention" in {package for package, _ in collect()}
