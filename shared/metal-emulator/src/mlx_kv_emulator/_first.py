"""Run MSL kernel bodies on a CPU: the semantics of mx.fast.metal_kernel, for tests (prototype)."""
import threading, ctypes, hashlib, mmap, os, re, subprocess, sys, time
import numpy as np
import mlx.core as mx

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = os.environ.get("MLX_KV_EMULATOR_CACHE", os.path.expanduser("~/.cache/mlx-kv-emulator"))
os.makedirs(CACHE, exist_ok=True)
STATS = {"compile_s": [], "last": None}
MLX_INC = next((p for p in (os.path.join(q, "mlx", "include") for q in sys.path)
                if os.path.exists(os.path.join(p, "mlx/backend/metal/kernels/utils.h"))), None)

_T = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.bool_: "bool", mx.uint8: "uint8_t",
      mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.uint64: "uint64_t", mx.int8: "int8_t", mx.int16: "int16_t",
      mx.int32: "int32_t", mx.int64: "int64_t", mx.complex64: "complex64_t"}
_NP = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16, mx.bool_: np.bool_, mx.uint8: np.uint8,
       mx.uint16: np.uint16, mx.uint32: np.uint32, mx.uint64: np.uint64, mx.int8: np.int8, mx.int16: np.int16,
       mx.int32: np.int32, mx.int64: np.int64, mx.complex64: np.complex64}
ATTRS = {"dispatch_quadgroups_per_threadgroup": "uint", "dispatch_simdgroups_per_threadgroup": "uint",
         "dispatch_threads_per_threadgroup": "uint3", "grid_origin": "uint3", "grid_size": "uint3",
         "quadgroup_index_in_threadgroup": "uint", "quadgroups_per_threadgroup": "uint",
         "simdgroup_index_in_threadgroup": "uint", "simdgroups_per_threadgroup": "uint", "thread_execution_width": "uint",
         "thread_index_in_quadgroup": "uint", "thread_index_in_simdgroup": "uint", "thread_index_in_threadgroup": "uint",
         "thread_position_in_grid": "uint3", "thread_position_in_threadgroup": "uint3",
         "threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3", "threads_per_grid": "uint3",
         "threads_per_simdgroup": "uint", "threads_per_threadgroup": "uint3"}
_s = lambda e: "{{%s}}" % e
_v = lambda f: "{{t->%s[0], t->%s[1], t->%s[2]}}" % (f, f, f)
ATTR_EXPR = {"dispatch_quadgroups_per_threadgroup": _s("(t->index_in_threadgroup, (t->simdgroups*8))"),
             "dispatch_simdgroups_per_threadgroup": _s("t->simdgroups"),
             "dispatch_threads_per_threadgroup": _v("dispatch_threads_per_threadgroup"), "grid_origin": _s("0"),
             "grid_size": _v("threads_per_grid"), "quadgroup_index_in_threadgroup": _s("t->index_in_threadgroup / 4"),
             "quadgroups_per_threadgroup": _s("t->simdgroups * 8"), "simdgroup_index_in_threadgroup": _s("t->simdgroup"),
             "simdgroups_per_threadgroup": _s("t->simdgroups"), "thread_execution_width": _s("32"),
             "thread_index_in_quadgroup": _s("t->lane % 4"), "thread_index_in_simdgroup": _s("t->lane"),
             "thread_index_in_threadgroup": _s("t->index_in_threadgroup"), "thread_position_in_grid": _v("position_in_grid"),
             "thread_position_in_threadgroup": _v("position_in_threadgroup"),
             "threadgroup_position_in_grid": _v("threadgroup_position"), "threadgroups_per_grid": _v("threadgroups_per_grid"),
             "threads_per_grid": _v("threads_per_grid"), "threads_per_simdgroup": _s("32"),
             "threads_per_threadgroup": _v("threads_per_threadgroup")}

# ------------------------------------------------------------------ compiler
ZIG = True
import ziglang as _z
_ZIGBIN = os.path.join(os.path.dirname(_z.__file__), "zig")
def cc():
    if ZIG: return [_ZIGBIN, "cc", "-march=x86_64_v3", "-fno-sanitize=undefined"]
    return [os.environ.get("MSL_CLANG", "clang-19"), "-march=x86-64-v3"]
BASE = ["-x", "c++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
        "-Wno-everything", "-Xclang", "-cl-single-precision-constant", "-Xclang", "-ffloat16-excess-precision=none",
        "-Xclang", "-fbfloat16-excess-precision=none", "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern", "-nostdinc++", "-ferror-limit=12",
        "-I", os.path.join(HERE, "shim"), "-I", HERE]
_libs = {}
_LOCK = threading.Lock()   # the runtime keeps its state in globals and ctypes drops the GIL

def _rt():
    if "rt" not in _libs:
        src = os.path.join(HERE, "msl_rt.cpp")
        h = hashlib.sha256(open(src, "rb").read() + open(os.path.join(HERE, "msl_rt.h"), "rb").read() + bytes(ZIG)).hexdigest()[:16]
        so = os.path.join(CACHE, f"rt-{h}.so")
        if not os.path.exists(so):
            subprocess.run(cc() + ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wno-everything", src, "-o", so + f".{os.getpid()}", "-lm", "-ldl"], check=True)
            os.replace(so + f".{os.getpid()}", so)
        _libs["rt"] = ctypes.CDLL(so, mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return _libs["rt"]

class MSLError(Exception): pass

# `threadgroup T x[..]` (a variable) becomes MSL_TGVAR; `threadgroup T* p` (a qualifier) stays.
_TOK = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\d[\w.]*|::|\s+|.', re.S)
def mark_threadgroup(src):
    toks = _TOK.findall(src)
    solid = [i for i, t in enumerate(toks) if not t.isspace() and not t.startswith(("//", "/*"))]
    pos = {i: k for k, i in enumerate(solid)}
    depth = 0
    for k, i in enumerate(solid):
        t = toks[i]
        if t == "(": depth += 1
        elif t == ")": depth -= 1
        if t != "threadgroup" or depth: continue
        j, ang, words, var = k + 1, 0, 0, False
        while j < len(solid):
            u = toks[solid[j]]
            if u == "<": ang += 1
            elif u == ">": ang -= 1
            elif ang: pass
            elif u in "*&": break
            elif u in "[;={," : var = words >= 2 or (u in "[;" and words >= 2); break
            elif u == "::": words -= 1
            elif u in ("(", ")"): break
            elif re.match(r"[A-Za-z_]", u) and u not in ("const", "constexpr", "volatile", "typename", "alignas"): words += 1
            j += 1
        # method qualifier: `foo() threadgroup {` or `... threadgroup : real(0)`
        if var and toks[solid[k - 1]] != ")": toks[i] = "MSL_TGVAR"
    return "".join(toks)

def prep(src, function_constants=None):
    src = re.sub(r"#pragma\s+METAL\s+fp\s+contract", "#pragma clang fp contract", src)   # an unknown pragma would be dropped in silence
    src = mark_threadgroup(re.sub(r"\[\[\s*threadgroup\(\d+\)\s*\]\]", "", src))
    fc = function_constants or {}
    def rep(m):
        n = m.group(2); v = fc.get(n, fc.get(int(m.group(3)), None))
        d = "true" if v is not None else "false"
        v = 0 if v is None else v
        v = str(v).lower() if isinstance(v, bool) else str(v)
        return f"static constant constexpr {m.group(1)} {n} = {v}; static constexpr bool {n}_defined = {d};"
    src = re.sub(r"constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]\s*;", rep, src)
    return src

def prep_tree(src, dst):
    """A prepared copy of a tree of MSL headers (included files need the same rewriting as the kernel)."""
    for d, _, fs in os.walk(src):
        for f in fs:
            if not f.endswith((".h", ".metal")): continue
            t = open(os.path.join(d, f)).read()
            if "[[kernel" not in t: t = mark_threadgroup(re.sub(r"\[\[\s*threadgroup\(\d+\)\s*\]\]", "", t))
            t = re.sub(r"((?:constant const|const constant) \w+) (\w+)\[\w+\](?=\s*[,)])", r"\1* \2", t)   # clang refuses these array parameters when qualified
            o = os.path.join(dst, os.path.relpath(os.path.join(d, f), src)); os.makedirs(os.path.dirname(o), exist_ok=True); open(o, "w").write(t)

def build(src, mode="run", opt="-O2", contract="on", reduce="tree", inc=(), extra=()):
    """mode: run | check (instrumented) | strict (address spaces, syntax only)"""
    flags = list(BASE) + [f"-ffp-contract={contract}"]
    for d in inc: flags += ["-I", d]
    if reduce == "linear": flags += ["-DMSL_LINEAR_REDUCE"]
    flags += list(extra)
    if mode == "strict": flags += ["-DMSL_STRICT", "-fsyntax-only"]
    elif mode == "check":
        flags += ["-DMSL_CHECKED", "-O1", "-g1", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0",
                  "-fsanitize=bounds,shift,integer-divide-by-zero,float-cast-overflow,alignment,bool", "-fsanitize-recover=all"]
    else: flags += [opt]
    shim = b"".join(open(os.path.join(HERE, "shim", f), "rb").read() for f in ("msl_shim.h", "metal_stdlib")) + open(os.path.join(HERE, "msl_rt.h"), "rb").read()
    key = hashlib.sha256("\0".join(flags + cc() + [src]).encode() + shim).hexdigest()[:20]
    so, cpp = os.path.join(CACHE, key + ".so"), os.path.join(CACHE, key + ".cpp")
    if mode == "strict":
        open(cpp, "w").write(src)
        r = subprocess.run([_ZIGBIN, "clang"] + [f for f in flags if f != "-fno-sanitize=undefined"] + [cpp], capture_output=True, text=True)
        return r.returncode, r.stderr
    if not os.path.exists(so):
        open(cpp, "w").write(src)
        t0 = time.perf_counter()
        tmp = f"{so}.{os.getpid()}"
        if mode == "check":   # the objects are instrumented, the runtime is ours: link without -fsanitize
            r = subprocess.run(cc() + flags + ["-c", cpp, "-o", tmp + ".o"], capture_output=True, text=True)
            if r.returncode == 0: r = subprocess.run(cc() + ["-shared", "-nostdlib", tmp + ".o", "-o", tmp], capture_output=True, text=True)
            if os.path.exists(tmp + ".o"): os.remove(tmp + ".o")
        else: r = subprocess.run(cc() + flags + ["-shared", "-nostdlib", cpp, "-o", tmp], capture_output=True, text=True)
        if r.returncode: raise MSLError("MSL does not compile:\n" + r.stderr[:6000])
        os.replace(tmp, so)
        STATS["compile_s"].append(time.perf_counter() - t0)
    return so

PARAM = re.compile(r"\[\[\s*([a-z_]+)\s*(?:\(([^()]*)\))?(?:\s*,\s*[a-z_]+\s*(?:\([^()]*\))?)*\s*\]\]")
def split_params(s):
    out, d, cur = [], 0, ""
    for c in s:
        if c in "(<[{": d += 1
        elif c in ")>]}": d -= 1
        if c == "," and d == 0: out.append(cur); cur = ""
        else: cur += c
    return out + [cur] if cur.strip() else out

def entry(fn, params, template=""):
    """C entry point for a kernel; buffer arguments are taken in order from b[]."""
    a, nbuf = [], 0
    for p in params:
        m = PARAM.search(p)
        if m and m.group(1) in ATTR_EXPR: a.append("msl::A_" + ATTR_EXPR[m.group(1)].replace("{{", "{{").replace("}}", "}}"))
        elif "*" in p: a.append(f"msl::P_{{b[{nbuf}]}}"); nbuf += 1
        elif "&" in p: a.append(f"msl::R_{{b[{nbuf}]}}"); nbuf += 1
        else: raise MSLError("parameter? " + p)
    return (f'\nextern "C" char __start_msl_tg[] __attribute__((weak)); extern "C" char __stop_msl_tg[] __attribute__((weak));\n'
            f'extern "C" __attribute__((visibility("default"))) void msl_tg_range(void** r) {{ r[0] = __start_msl_tg; r[1] = __stop_msl_tg; }}\n'
            f'extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void msl_entry(void** b, const msl_thread* t) {{ {fn}{template}({", ".join(a)}); }}\n'), nbuf

class BI(ctypes.Structure): _fields_ = [("p", ctypes.c_void_p), ("n", ctypes.c_ulong), ("writable", ctypes.c_int), ("init", ctypes.c_int), ("name", ctypes.c_char_p)]
class D(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("bufs", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("tg", ctypes.c_uint * 3),
                ("order", ctypes.c_int), ("checked", ctypes.c_int), ("strict_div", ctypes.c_int), ("poison", ctypes.c_int),
                ("tg_lo", ctypes.c_void_p), ("tg_hi", ctypes.c_void_p), ("arena_lo", ctypes.c_void_p), ("arena_hi", ctypes.c_void_p),
                ("img_lo", ctypes.c_void_p), ("img_hi", ctypes.c_void_p), ("nbuf", ctypes.c_int), ("bi", ctypes.POINTER(BI)),
                ("log", ctypes.c_char_p), ("nerr", ctypes.c_int), ("fatal", ctypes.c_int), ("st", ctypes.c_ulong * 4), ("unwritten", ctypes.c_ulong)]

def _image(path):
    lo, hi = None, 0
    for l in open("/proc/self/maps"):
        if path in l:
            a, b = (int(x, 16) for x in l.split()[0].split("-"))
            lo = a if lo is None else min(lo, a); hi = max(hi, b)
    return lo or 0, hi

def _load(so):
    if so not in _libs:
        _rt(); lib = ctypes.CDLL(so)
        r = (ctypes.c_void_p * 2)(); lib.msl_tg_range(r)
        _libs[so] = (lib, r[0] or 0, r[1] or 0, _image(os.path.basename(so)))
    return _libs[so]

def symbolize(log, base_line=0):
    def f(m):
        try:
            o = subprocess.run(["addr2line", "-i", "-e", m.group(1), m.group(2)], capture_output=True, text=True).stdout.split("\n")
            o = [x for x in o if x and "msl_shim" not in x]
            return "at " + " < ".join(os.path.basename(x) for x in o[:3]) if o else m.group(0)
        except FileNotFoundError: return m.group(0)
    return re.sub(r"@(\S+?)\+(0x[0-9a-f]+)", f, log)

def launch(so, bufs, grid, tg, mode="run", order=0, strict_div=True, poison=0xFF):
    """bufs: list of (name, numpy array or None, writable, initialised)"""
    lib, lo, hi, img = _load(so)
    d = D(); d.entry = ctypes.cast(lib.msl_entry, ctypes.c_void_p)
    tg = [min(t, g) for t, g in zip(tg, grid)]
    if np.prod(tg) > 1024: raise MSLError(f"threadgroup of {np.prod(tg)} threads")
    if hi - lo > 32768: raise MSLError(f"{hi - lo} bytes of threadgroup memory: over the 32 KiB limit")
    if min(grid) <= 0: STATS["last"] = dict(run_s=0, simd_ops=0, barriers=0, switches=0, accesses=0, unwritten=0, tg_bytes=hi - lo); return 0.0   # empty dispatch: nothing runs
    d.grid[:], d.tg[:] = grid, tg
    d.order, d.checked, d.strict_div, d.poison = order, mode == "check", strict_div, poison
    d.tg_lo, d.tg_hi, d.img_lo, d.img_hi = lo, hi, *img
    ptrs = (ctypes.c_void_p * max(1, len(bufs)))(); bi = (BI * max(1, len(bufs)))(); nb = 0
    if mode == "check":   # exact-size copies with wide red zones
        RZ = 65536
        total = sum((b[1].nbytes + 63) // 64 * 64 + RZ for b in bufs if b[1] is not None) + 2 * RZ
        arena = mmap.mmap(-1, total); base = ctypes.addressof(ctypes.c_char.from_buffer(arena)); off = RZ
        d.arena_lo, d.arena_hi = base, base + total
        for i, (n, a, w, ini) in enumerate(bufs):
            if a is None: ptrs[i] = None; continue
            ctypes.memmove(base + off, a.ctypes.data, a.nbytes); ptrs[i] = base + off
            bi[nb] = BI(base + off, a.nbytes, w, ini, n.encode()); nb += 1
            off += (a.nbytes + 63) // 64 * 64 + RZ
    else:
        keep = []
        for i, (n, a, w, ini) in enumerate(bufs):
            if a is None: ptrs[i] = None; continue
            c = np.zeros(a.nbytes + 64, np.uint8); o = -c.ctypes.data % 64; y = c[o:o + a.nbytes]
            ctypes.memmove(y.ctypes.data, a.ctypes.data, a.nbytes); keep.append((c, y)); ptrs[i] = y.ctypes.data
    d.bufs = ctypes.cast(ptrs, ctypes.c_void_p); d.nbuf = nb; d.bi = bi
    t0 = time.perf_counter()
    with _LOCK: _rt().msl_run(ctypes.byref(d)); log0 = (d.log or b"").decode()
    dt = time.perf_counter() - t0
    if True:
        for i, (n, a, w, ini) in enumerate(bufs):
            if a is not None and w: ctypes.memmove(a.ctypes.data, ptrs[i], a.nbytes)
    log = log0 if d.nerr else ""
    STATS["last"] = dict(run_s=dt, simd_ops=d.st[0], barriers=d.st[1], switches=d.st[2], accesses=d.st[3], unwritten=d.unwritten, tg_bytes=hi - lo)
    if d.nerr and (d.fatal or mode == "check"): raise MSLError(symbolize(log))
    if d.nerr: STATS["last"]["log"] = log
    return dt

def _np(a):  # mx.array -> (numpy view, bit pattern for bfloat16)
    mx.eval(a)
    return np.asarray(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)
def _strided(a):
    """Keep the strides of a non-contiguous array: a copy of the memory it spans is enough for a prototype."""
    mx.eval(a); mv = memoryview(a); it = mv.itemsize
    n = np.asarray(a.astype(mx.float32)) if a.dtype == mx.bfloat16 else np.asarray(a)
    st = [s // it for s in mv.strides]
    span = 1 + sum((s - 1) * t for s, t in zip(a.shape, st))
    dt = _NP[a.dtype]; buf = np.zeros(span, dt)
    v = np.lib.stride_tricks.as_strided(buf, a.shape, mv.strides)
    v[...] = _np(mx.contiguous(a))
    return buf, st

CONFIG = dict(mode="run", order=0, contract="on", reduce="tree", opt="-O2", strict_div=True)

def metal_kernel(name, input_names, output_names, source, header="", ensure_row_contiguous=True, atomic_outputs=False, compile_options=None):
    def call(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, init_value=None, verbose=False, stream=None, **over):
        return emulate_metal(name, input_names, output_names, source, header, inputs, template, grid, threadgroup, output_shapes,
                             output_dtypes, init_value=init_value, ensure_row_contiguous=ensure_row_contiguous, atomic_outputs=atomic_outputs, verbose=verbose, **over)
    return call

def emulate_metal(name, input_names, output_names, source, header, inputs, template, grid, threadgroup, output_shapes, output_dtypes,
                  init_value=None, ensure_row_contiguous=True, atomic_outputs=False, verbose=False, **over):
    cfg = {**CONFIG, **over}
    inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    assert len(inputs) == len(input_names) and len(output_names) == len(output_shapes) == len(output_dtypes)
    tdef, tuse = "", ""
    if template:
        kinds = ["bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename" for _, v in template]
        tdef = "template <" + ", ".join(f"{k} {n}" for k, (n, _) in zip(kinds, template)) + ">\n"
        tuse = "<" + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) if isinstance(v, int) else _T[v] for _, v in template) + ">"
    params, bufs, keep = [], [], []
    for n, a in zip(input_names, inputs):
        loc = "constant" if a.size < 8 else "device"
        params.append(f"  const {loc} {_T[a.dtype]}{'&' if a.ndim == 0 else '*'} {n} [[buffer({len(params)})]]")
        strides = None
        if ensure_row_contiguous or memoryview(a).c_contiguous:
            arr = np.ascontiguousarray(_np(mx.contiguous(a))); strides = [int(np.prod(a.shape[i + 1:])) for i in range(a.ndim)]
        else: arr, strides = _strided(a)
        bufs.append((n, arr.reshape(-1), 0, 1))
        if a.ndim:
            if n + "_shape" in source: params.append(f"  const constant int* {n}_shape [[buffer({len(params)})]]"); bufs.append((n + "_shape", np.array(a.shape, np.int32), 0, 1))
            if n + "_strides" in source: params.append(f"  const constant int64_t* {n}_strides [[buffer({len(params)})]]"); bufs.append((n + "_strides", np.array(strides, np.int64), 0, 1))
            if n + "_ndim" in source: params.append(f"  const constant int& {n}_ndim [[buffer({len(params)})]]"); bufs.append((n + "_ndim", np.array([a.ndim], np.int32), 0, 1))
    outs = []
    for n, s, dt in zip(output_names, output_shapes, output_dtypes):
        t = f"atomic<{_T[dt]}>" if atomic_outputs else _T[dt]
        params.append(f"  device {t}* {n} [[buffer({len(params)})]]")
        o = np.empty(int(np.prod(s)), _NP[dt]); o.view(np.uint8)[...] = 0xFF   # poison
        if init_value is not None: o[...] = _np(mx.array(init_value, dt))
        outs.append(o); bufs.append((n, o, 1, init_value is not None))
    for at, ty in ATTRS.items():
        if at in source: params.append(f"  {ty} {at} [[{at}]]")
    fn = "custom_kernel_" + re.sub(r"\W", "_", name)
    pre = '#include "mlx/backend/metal/kernels/utils.h"\n' if MLX_INC else "#include <metal_stdlib>\nusing namespace metal;\ntypedef bfloat bfloat16_t; typedef half float16_t;\n"
    user = prep(header) + "\n" + tdef + "[[kernel]] void " + fn + "(\n" + ",\n".join(params) + ") {\n#line 1 \"" + name + ".metal\"\n" + prep(source) + "\n}\n"
    ent, nb = entry(fn, params, tuse)
    assert nb == len(bufs)
    src = pre + user + '#line 1 "entry"\n' + ent
    if verbose: print(src)
    inc = [MLX_INC] if MLX_INC else []
    if cfg["mode"] == "strict":   # clang's C++ refuses some of MLX's utils.h (array parameters with an address space): a small prelude
        sp = ("#include <metal_stdlib>\nusing namespace metal;\ntypedef bfloat bfloat16_t; typedef half float16_t;\n") + user
        if template:  # instantiate through decltype, as MLX does
            sp = sp + f"\ntemplate decltype({fn}{tuse}) {fn}{tuse};\n"
        return build(sp, mode="strict", inc=inc)
    so = build(src, mode=cfg["mode"], opt=cfg["opt"], contract=cfg["contract"], reduce=cfg["reduce"], inc=inc)
    launch(so, bufs, grid, threadgroup, cfg["mode"], cfg["order"], cfg["strict_div"])
    res = []
    for o, s, dt in zip(outs, output_shapes, output_dtypes):
        a = mx.array(o.reshape(s))
        res.append(a.view(mx.bfloat16) if dt == mx.bfloat16 else a)
    return res

def run_kernel(includes, kernel, template, args, grid=None, threadgroup=None, threadgroups=None, function_constants=None, header="", inc=(), **over):
    """A whole [[kernel]] function from MSL headers. args: numpy arrays (buffers; written in place when listed as ('out', a)), scalars as
    numpy scalars, None for an absent optional buffer. `threadgroups` is the dispatchThreadgroups form."""
    cfg = {**CONFIG, **over}
    text = "".join(open(i).read() for i in includes)
    m = re.search(r"\[\[kernel[^\n]*\]\]\s*void\s+" + kernel + r"\s*\((.*?)\)\s*\{", text, re.S)
    params = split_params(re.sub(r"//[^\n]*", "", m.group(1)))
    src = header + "".join(prep(open(i).read(), function_constants) + "\n" for i in includes)
    ent, nb = entry(kernel, params, f"<{template}>" if template else "")
    if nb != len(args): raise MSLError(f"{nb} buffers expected, {len(args)} given")
    bufs = []
    for i, a in enumerate(args):
        w = isinstance(a, tuple); a = a[1] if w else a
        if a is not None: a = np.atleast_1d(a); assert a.flags.c_contiguous
        bufs.append((f"arg{i}", a, int(w), 0 if w else 1))
    if threadgroups is not None: grid = [g * t for g, t in zip(threadgroups, threadgroup)]
    incs = list(inc) + ([MLX_INC] if MLX_INC else [])
    if cfg["mode"] == "strict":
        return build(src + (f"\ntemplate decltype({kernel}<{template}>) {kernel}<{template}>;\n" if template else ""), mode="strict", inc=incs)
    so = build(src + ent, mode=cfg["mode"], opt=cfg["opt"], contract=cfg["contract"], reduce=cfg["reduce"], inc=incs)
    return launch(so, bufs, grid, threadgroup, cfg["mode"], cfg["order"], cfg["strict_div"])

def install():
    """Make mx.fast.metal_kernel (and so every library that calls it) run here."""
    mx.fast.metal_kernel = metal_kernel
