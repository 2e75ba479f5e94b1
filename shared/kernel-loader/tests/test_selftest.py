from mlx_kv_kernels.selftest import Case, collect, selftest
from mlx_kv_kernels.selftest_cases import cases
from mlx_kv_kernels.testing import legs


def test_this_package_registers_its_cases():
    found = [(case.kernel, case.variant) for package, case in collect() if package == "mlx-kv-kernels"]
    assert ("topk_rows", "32768 rows") in found
    assert ("gather_rows", "bfloat16, width 128") in found


def test_own_cases_pass_on_every_usable_backend():
    """On the emulator, which compiles slowly, one case of each kernel: the others differ in numbers only."""
    usable = {leg.backend for leg in legs()}
    first = {case.kernel: case for case in reversed(cases())}.values()
    results = list(selftest([("own", case) for case in (first if usable == {"emulator"} else cases())]))
    assert {result.backend for result in results if result.status == "passed"} == usable
    assert [result for result in results if result.status == "failed"] == []


def test_says_what_failed_and_what_did_not_run(monkeypatch):
    def broken(backend):
        raise ValueError("the sum is off")

    monkeypatch.setattr(
        "mlx_kv_kernels.selftest.backends",
        lambda: {"metal": (True, "here"), "cuda": (False, "no GPU"), "emulator": (True, "here")},
    )
    ran = []
    results = list(selftest([("a", Case("good", "2 bit", ran.append)), ("b", Case("bad", "4 bit", broken))]))
    assert ran == ["metal", "emulator"]
    assert [(r.package, r.kernel, r.backend, r.status, r.reason) for r in results] == [
        ("a", "good", "metal", "passed", ""),
        ("a", "good", "cuda", "not run", "no GPU"),
        ("a", "good", "emulator", "passed", ""),
        ("b", "bad", "metal", "failed", "ValueError: the sum is off"),
        ("b", "bad", "cuda", "not run", "no GPU"),
        ("b", "bad", "emulator", "failed", "ValueError: the sum is off"),
    ]
