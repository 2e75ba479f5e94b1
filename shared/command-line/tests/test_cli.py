import io
import json
import re
import subprocess
import sys

import mlx.core as mx
import pytest

import mlx_kv
from mlx_kv import MethodInfo
from mlx_kv_cli import console, lm, models, passkey
from mlx_kv_cli.main import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_kv", *arguments])
        # What the terminal is must not matter: a dumb one is taken to be 80 columns wide, whatever COLUMNS says.
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(console.out, "width", 200)
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def loaded(monkeypatch, smollm2):
    """Commands get the model that the session has loaded already."""
    monkeypatch.setattr(console, "load", lambda name: smollm2)
    return smollm2


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ([], "generate methods perplexity evaluate selftest --version"),
        (
            ["generate"],
            "--model --prompt --method --system-prompt --prefill-response --max-tokens --temp --top-p --min-p --top-k "
            "--prompt-cache-file --seed --ignore-chat-template --chat-template-config --prefill-step-size --json "
            "smollm2 kivi(bits=2)",
        ),
        (["methods"], "--json"),
        (["selftest"], "--allow-cpu --json"),
        (["perplexity"], "--model --method --text --tokens --prefill --chunk --kv-bits --kv-group-size --json"),
        (["evaluate"], "passkey"),
        (["evaluate", "passkey"], "--model --method --length --depths --seeds --filler --json"),
    ],
)
def test_help_names_everything(run, command, names):
    code, out, _ = run(*command, "--help")
    assert code == 0
    for name in names.split():
        assert name in plain(out)


def test_help_comes_without_mlx_and_json_is_all_there_is_on_stdout():
    code = "import sys\nfrom mlx_kv_cli.main import main\ntry:\n main()\nfinally:\n print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "generate", "--help"], capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done.stderr
    done = subprocess.run([sys.executable, "-m", "mlx_kv_cli", "methods", "--json"], capture_output=True, text=True)
    assert done.returncode == 0
    assert {"dense", "keep_all"} <= {method["name"] for method in json.loads(done.stdout)["methods"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --model ./nowhere --prompt x", "cannot load model ./nowhere: there is no such folder"),
        ("generate --model . --prompt x", "cannot load model .: "),
        ("generate --model m --prompt x --chat-template-config {", "--chat-template-config is not JSON"),
        ("generate --model m --prompt x --chat-template-config 3", "--chat-template-config expected a JSON object"),
        ("perplexity --model m --text nothing", "no file and no pydoc topic is called 'nothing'"),
        ("evaluate passkey --model m --filler poems", "--filler expected repeated or documentation, got poems"),
        ("evaluate passkey --model m --depths half", "--depths expected numbers between 0 and 1"),
    ],
)
def test_errors_are_one_line_on_stderr_and_exit_code_2(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    *progress, last = err.strip().splitlines()
    assert last.startswith(f"error: {message}")
    assert all(line.startswith("Loading ") for line in progress)


@pytest.mark.parametrize(
    "arguments", ["generate --prompt x", "generate --model m --prompt x --temp hot", "generate -x"]
)
def test_wrong_flags_exit_with_2_and_say_so(run, arguments):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert re.search(r"Missing option|Invalid value|No such option", err)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nothing(bits=2)", "no method 'nothing' is installed"),
        ("dense(", "got 'dense('"),
        ("dense(bits=2)", "bits"),
        ("dense+dense", "expected a policy, a store or policy+store"),
    ],
)
def test_bad_methods_are_told_before_anything_runs(run, loaded, method, message):
    for command in (["generate", "--prompt", "x"], ["perplexity"], ["evaluate", "passkey"]):
        code, out, err = run(*command, "--model", "smollm2", "--method", method)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: --method {method}: ")
        assert message in err
        assert len(err.splitlines()) == 1


def test_unfit_models_and_settings_are_told(run, loaded, monkeypatch):
    code, _, err = run("perplexity", "--model", "smollm2", "--tokens", "100", "--prefill", "99")
    assert (code, err) == (2, "error: --text and --tokens give 100 tokens, --prefill 99 needs 101\n")
    code, _, err = run("evaluate", "passkey", "--model", "smollm2", "--length", "20")
    assert code == 2
    assert err.startswith("error: [passkey] expected a length of at least")
    code, _, err = run("generate", "--model", "smollm2", "--ignore-chat-template", "--prompt", "")
    assert (code, err) == (2, "error: the prompt is empty\n")


def test_methods_table_names_the_broken_one_with_its_error(run, monkeypatch):
    good = MethodInfo("good", "store", "mlx-kv-good", "1.2", "Does good.", {"bits": 2, "sinks": 4})
    bad = MethodInfo("bad", "unknown", "mlx-kv-bad", "0.1", error="ImportError('no such thing')")
    monkeypatch.setattr(mlx_kv, "methods", lambda: [good, bad])
    code, out, _ = run("methods")
    assert code == 0
    for part in ("good", "store", "bits=2, sinks=4", "mlx-kv-good 1.2", "Does good.", "broken", "no such thing"):
        assert part in out
    code, out, _ = run("methods", "--json")
    rows = json.loads(out)["methods"]
    assert rows[0]["options"] == {"bits": 2, "sinks": 4}
    assert rows[1]["error"] == "ImportError('no such thing')"
    assert set(rows[0]) == {"name", "kind", "distribution", "version", "summary", "options", "error"}


def test_generate_json(run, loaded):
    prompt = "Explain in two sentences why the sky is blue."
    code, out, _ = run(
        "generate", "--model", "smollm2", "--method", "dense", "--prompt", prompt, "--max-tokens", "30", "--json"
    )
    facts = json.loads(out)
    assert code == 0
    assert "scatter" in facts["text"]
    assert (facts["prompt_tokens"], facts["generation_tokens"], facts["finish_reason"]) == (40, 30, "length")
    assert facts["prompt_tps"] > 0
    assert facts["generation_tps"] > 0
    assert facts["peak_memory_bytes"] > 134e6 * 4 * 0.9  # the weights alone, in float32
    cache = facts["cache"]
    rows = 40 + 30  # mlx-lm has fed one token more than it tells, and the last one not
    assert {layer["rows"] for layer in cache["layers"]} <= {rows - 1, rows}
    assert len(cache["layers"]) == 30
    assert cache["fp16_bytes"] == sum(layer["fp16_bytes"] for layer in cache["layers"])
    assert cache["bytes_held"] == sum(layer["bytes_held"] for layer in cache["layers"])
    assert cache["ratio"] == pytest.approx(cache["fp16_bytes"] / cache["bytes_held"])
    assert cache["not_compressed"] == []
    assert (facts["model"], facts["method"], facts["dtype"]) == ("smollm2", "dense", "float32")
    assert "mlx" in facts["environment"]


def test_generate_text_then_the_facts(run, loaded):
    arguments = ["generate", "--model", "smollm2", "--max-tokens", "3", "--ignore-chat-template", "--prompt"]
    code, out, _ = run(*arguments, "The capital of France is")
    assert code == 0
    text, facts = out.split("\n\n", 1)
    assert "Paris" in text
    assert re.fullmatch(
        r"Prompt: 5 tokens, [\d.]+ tokens/s\n"
        r"Generation: 3 tokens, [\d.]+ tokens/s\n"
        r"Cache: [\d.]+ MB held, [\d.]+ MB as fp16 \(ratio [\d.]+\)\n"
        r"Peak memory: [\d,.]+ MB\n"
        r"Not compressed: no --method was given\n",
        facts,
    )


def test_generate_reads_stdin_and_passes_its_flags_on(run, loaded, monkeypatch):
    seen = {}

    def stream(model, tokenizer, prompt, cache, **options):
        seen.update(options, prompt=prompt)
        yield lm.Piece("ok", 1, len(prompt), 1.0, 1, 1.0, "stop")

    monkeypatch.setattr(lm, "stream", stream)
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    flags = "--prompt - --system-prompt Be-brief --prefill-response Sure -m 7 --temp 0.5 --top-p 0.9 --min-p 0.1"
    code, out, _ = run("generate", "--model", "smollm2", *flags.split(), "--top-k", "5", "--prefill-step-size", "64")
    assert code == 0
    assert out.startswith("ok\n")
    prompt = loaded.tokenizer.decode(seen["prompt"])
    assert prompt == (
        "<|im_start|>system\nBe-brief<|im_end|>\n<|im_start|>user\nfrom a pipe<|im_end|>\n<|im_start|>assistant\nSure"
    )
    assert seen["sampling"] == lm.Sampling(temp=0.5, top_p=0.9, min_p=0.1, top_k=5)
    assert (seen["max_tokens"], seen["prefill_step_size"]) == (7, 64)


def test_a_seed_repeats_the_sample(run, loaded):
    flags = [
        "generate",
        "--model",
        "smollm2",
        "--prompt",
        "Hello",
        "--max-tokens",
        "5",
        "--temp",
        "2",
        "--json",
        "--seed",
    ]
    texts = [json.loads(run(*flags, seed)[1])["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_perplexity_command(run, loaded):
    flags = "perplexity --model smollm2 --method dense --kv-bits 8 --kv-group-size 32 --tokens 96 --prefill 64"
    code, out, _ = run(*flags.split(), "--json")
    facts = json.loads(out)
    assert code == 0
    assert [row["method"] for row in facts["results"]] == ["dense", "mlx-lm kv_bits=8 kv_group_size=32"]
    assert (facts["tokens"], facts["prefill"], facts["chunk"], facts["full"]["tokens"]) == (96, 64, 32, 32)
    for row in facts["results"]:
        assert row["full_perplexity"] == facts["full"]["perplexity"]
        assert row["ratio"] == pytest.approx(1, abs=0.02)  # 8 bits lose next to nothing
    assert facts["results"][1]["bytes_held"] < facts["full"]["bytes_held"]
    code, out, _ = run(*flags.split())
    assert code == 0
    for part in ("full", "dense", "mlx-lm kv_bits=8", "perplexity", "ratio", "KL"):
        assert part in out


def test_mlx_lm_refuses_impossible_bits(run, loaded):
    code, out, err = run("perplexity", "--model", "smollm2", "--kv-bits", "7", "--tokens", "96", "--prefill", "64")
    assert (code, out) == (2, "")
    assert err.startswith("error: --kv-bits 7: ")


def test_passkey_command(run, loaded, monkeypatch):
    def recalls(lockstep, *_):
        return [type(cache[0]).__name__ == "KVCache" for cache in lockstep.caches]

    monkeypatch.setattr(passkey, "_recalls", recalls)
    flags = "evaluate passkey --model smollm2 --method dense --length 200 --length 300 --depths 0,1 --seeds 3"
    code, out, _ = run(*flags.split(), "--json")
    facts = json.loads(out)
    assert code == 0
    found = [(row["method"], row["filler"], row["successes"], row["trials"]) for row in facts["results"]]
    assert found == [
        ("full", "repeated", 12, 12),
        ("full", "documentation", 12, 12),
        ("dense", "repeated", 0, 12),
        ("dense", "documentation", 0, 12),
    ]
    assert facts["results"][0]["cells"][1] == {"length": 200, "depth": 1.0, "successes": 3, "trials": 3}
    code, out, _ = run(*flags.split(), "--filler", "repeated")
    assert code == 0
    for part in ("200 @ 0", "300 @ 1", "3/3", "0/12", "repeated"):
        assert part in out
    assert "documentation" not in out


def test_a_saved_cache_is_continued_inside_the_users_message(run, loaded, tmp_path):
    question, rest = "Explain in two sentences", " why the sky is blue."
    flags = ["generate", "--model", "smollm2", "--method", "dense", "--max-tokens", "6", "--json", "--prompt"]
    whole = json.loads(run(*flags, question + rest)[1])

    start = models.encode_prompt(loaded.tokenizer, question + "<end>")
    start = loaded.tokenizer.encode(loaded.tokenizer.decode(start).split("<end>")[0], add_special_tokens=False)
    cache = mlx_kv.make_prompt_cache(loaded.model, "dense")
    lm.feed(loaded.model, mx.array([start]), cache)
    file = tmp_path / "start.safetensors"
    mlx_kv.save_prompt_cache(str(file), cache)
    code, out, _ = run(*flags, rest, "--prompt-cache-file", str(file))
    facts = json.loads(out)
    assert code == 0
    assert facts["text"] == whole["text"]
    assert facts["prompt_tokens"] == whole["prompt_tokens"] - len(start)
    assert [layer["rows"] for layer in facts["cache"]["layers"]] == [
        layer["rows"] for layer in whole["cache"]["layers"]
    ]

    for content in (b"", b"not a cache"):
        file.write_bytes(content)
        code, out, err = run(*flags, rest, "--prompt-cache-file", str(file))
        assert (code, out) == (2, "")
        assert err.startswith(f"error: --prompt-cache-file {file}: ")
        assert len(err.splitlines()) == 1
    code, out, err = run(*flags, rest, "--prompt-cache-file", str(tmp_path / "absent.safetensors"))
    assert (code, out) == (2, "")
