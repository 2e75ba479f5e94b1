import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kv_cli import lm, passkey
from mlx_kv_cli.passkey import FILLERS, PasskeyCell, make_prompt


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


def test_successes_are_counted_per_cell_with_a_fresh_cache_each(monkeypatch):
    caches, prompts, steps = [], [], []

    def answer(model, tokenizer, prompt, cache, *, max_tokens, sampling, prefill_step_size):
        prompts.append(prompt)
        caches.append(cache)
        text = tokenizer.decode(prompt)
        key = text.split("The pass key is ")[1][:5]
        early = text.index(key) < len(text) / 2
        said = f" {key}." if early else f" 1{key}"  # the key inside another number does not count
        assert max_tokens >= 6
        assert sampling == lm.Sampling(temp=0)
        for character in said[:max_tokens]:
            yield lm.Piece(character, 0, 1, 1.0, 1, 1.0, None)

    monkeypatch.setattr(lm, "stream", answer)
    result = passkey.passkey(
        None,
        TOKENIZER,
        lambda: [object()],
        filler="documentation",
        lengths=(600, 900),
        depths=(0.0, 1.0),
        seeds=range(3),
        on_progress=lambda *step: steps.append(step),
    )
    assert result.filler == "documentation"
    assert result.cells == (
        PasskeyCell(600, 0.0, 3, 3),
        PasskeyCell(600, 1.0, 0, 3),
        PasskeyCell(900, 0.0, 3, 3),
        PasskeyCell(900, 1.0, 0, 3),
    )
    assert (result.successes, result.trials) == (6, 12)
    assert len({id(cache[0]) for cache in caches}) == 12
    assert steps == [(done, 12) for done in range(1, 13)]


def test_smollm2_finds_a_key(smollm2):
    def full():
        return lm.full_cache(smollm2.model)

    result = passkey.passkey(
        smollm2.model, smollm2.tokenizer, full, filler="documentation", lengths=(300,), depths=(0.5,), seeds=range(1)
    )
    assert result.successes == 1
