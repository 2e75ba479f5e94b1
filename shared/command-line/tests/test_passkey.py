from typing import ClassVar

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kv import CompressedKVCache, DenseStore, make_prompt_cache
from mlx_kv.testing.baselines import LastRows
from mlx_kv.window import WindowOptions
from mlx_kv_cli import lm, passkey
from mlx_kv_cli.passkey import FILLERS, PasskeyCell, PasskeyResult, make_prompt


class CharTokenizer:
    """One token per character: the text can be read straight from the tokens."""

    bos_token = None
    has_chat_template = False

    def encode(self, text, *, add_special_tokens=True):
        return [min(ord(character), 127) for character in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


TOKENIZER = CharTokenizer()


@settings(deadline=None)  # the first example encodes the whole documentation
@given(
    length=st.integers(300, 3000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    filler=st.sampled_from(FILLERS),
)
def test_prompts_have_the_length_asked_for_and_one_key_at_its_depth(length, depth, seed, filler):
    tokens, key = make_prompt(TOKENIZER, length, depth, seed, filler)
    text = TOKENIZER.decode(tokens)
    assert len(tokens) == length
    assert len(key) == 5
    assert text.startswith(passkey.TASK)
    assert text.endswith(passkey.QUESTION)
    needle = passkey.NEEDLE.format(key=key)
    assert text.count(needle) == 1
    room = length - len(passkey.TASK) - len(needle) - len(passkey.QUESTION)
    assert text.index(needle) - len(passkey.TASK) == pytest.approx(depth * room, abs=0.5)
    assert make_prompt(TOKENIZER, length, depth, seed, filler) == (tokens, key)


def test_seeds_depths_and_lengths_give_other_keys():
    cases = [(length, depth, seed) for length in (400, 500) for depth in (0.1, 0.9) for seed in range(5)]
    keys = {make_prompt(TOKENIZER, *case, "repeated")[1] for case in cases}
    assert len(keys) == len(cases)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((50, 0.5, 0, "repeated"), "expected a length of at least"),
        ((500, 1.5, 0, "repeated"), "expected a depth between 0 and 1, got 1.5"),
        ((500, 0.5, 0, "poems"), "expected a filler of repeated, documentation, got 'poems'"),
    ],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"^\[passkey\] {message}"):
        make_prompt(TOKENIZER, *arguments)


class Spelling:
    """In Lockstep's place: the first cache answers with the key where it lies early, the second never."""

    made: ClassVar[list] = []

    def __init__(self, model, caches):
        self.caches, self.prompt, self.said = caches, [], 0
        self.made.append(self)

    def feed(self, tokens):
        self.prompt += tokens[0].tolist()

    def logits(self, tokens):
        assert tokens.shape == (2, 1)
        if self.said == 0:
            self.prompt.append(tokens[0].item())
        text = TOKENIZER.decode(self.prompt)
        key = text.split("The pass key is ")[1][:5]
        early = text.index(key) < len(text) / 2
        # The key inside another number does not count.
        for answer in (f" {key}. It" if early else " nothing", f" 1{key} "):
            yield mx.arange(128)[None] == ord(answer[self.said])
        self.said += 1


def test_successes_are_counted_per_cell_with_fresh_caches_each(monkeypatch):
    monkeypatch.setattr(passkey, "Lockstep", Spelling)
    Spelling.made.clear()
    steps = []
    results = passkey.passkeys(
        None,
        TOKENIZER,
        {"good": lambda: [object()], "bad": lambda: [object()]},
        filler="documentation",
        lengths=(600, 900),
        depths=(0.0, 1.0),
        seeds=range(3),
        prefill_step_size=128,
        on_progress=lambda *step: steps.append(step),
    )
    places = [(600, 0.0), (600, 1.0), (900, 0.0), (900, 1.0)]
    good = [PasskeyCell(*place, 3 * (place[1] == 0), 3) for place in places]
    assert results["good"] == PasskeyResult("documentation", tuple(good))
    assert results["bad"] == PasskeyResult("documentation", tuple(PasskeyCell(*place, 0, 3) for place in places))
    assert (results["good"].successes, results["good"].trials) == (6, 12)
    assert len({id(cache[0]) for lockstep in Spelling.made for cache in lockstep.caches}) == 24
    assert [len(lockstep.prompt) for lockstep in Spelling.made] == [600] * 6 + [900] * 6
    assert steps == [(done, 12) for done in range(1, 13)]


def test_smollm2_finds_a_key(smollm2):
    caches = {
        "full": lambda: lm.full_cache(smollm2.model),
        "dense": lambda: make_prompt_cache(smollm2.model, "dense"),
        "last rows": lambda: [
            CompressedKVCache(LastRows(WindowOptions(budget=64, window=8)), DenseStore()) for _ in smollm2.model.layers
        ],
    }
    results = passkey.passkeys(
        smollm2.model, smollm2.tokenizer, caches, filler="documentation", lengths=(300,), depths=(0.5,), seeds=range(1)
    )
    assert {name: result.successes for name, result in results.items()} == {"full": 1, "dense": 1, "last rows": 0}
