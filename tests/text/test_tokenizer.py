"""The tokenizer and the detokenizer against the `tokenizers` library and ids worked by hand."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from dinfer.errors import CheckpointError, RequestError
from dinfer.text.tokenizer import Detokenizer, Tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
CORPUS = [
    "the cat sat on the mat",
    "你好，世界。你好吗？",
    "family 👨‍👩‍👧‍👦 and 😀😃 flags 🇨🇭",
    "naïve café",
] * 3
FAMILY = "👨\u200d👩\u200d👧\u200d👦"


def letter(byte: int) -> str:
    """GPT-2's letter for a byte: itself where it prints, else the next one from U+0100 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return chr(byte) if byte in prints else chr(256 + others.index(byte))


def library() -> tokenizers.Tokenizer:
    """A small byte-level BPE with two special tokens and one added token that is not special."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=LETTERS, show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(["<|end|>", "<|mask|>"])
    made.add_tokens(["<think>"])
    return made


def save(folder: Path, made: tokenizers.Tokenizer) -> Path:
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def truth() -> tokenizers.Tokenizer:
    return library()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, truth: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("bpe"), truth))


@pytest.mark.parametrize("text", ["", "the cat", " 你好 😀", FAMILY, "tab\t\n\r\n  x", "naïve"])
def test_plain_text_is_encoded_as_the_library_does(tokenizer, truth, text):
    assert tokenizer.encode(text) == truth.encode(text).ids
    assert tokenizer.encode(text, special=True) == truth.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_added_tokens_are_recognised_only_on_demand(tokenizer, truth):
    text = "a<|mask|><think>b<|end|>"
    by_hand = [truth.token_to_id(t) for t in ("a", "<|mask|>", "<think>", "b", "<|end|>")]
    assert tokenizer.encode(text, special=True) == by_hand
    ids = tokenizer.encode(text)
    assert not {truth.token_to_id(t) for t in ("<|mask|>", "<think>", "<|end|>")} & set(ids)
    assert tokenizer.decode(ids) == text


def test_decode_leaves_out_special_tokens_alone(tokenizer):
    ids = tokenizer.encode("a<|mask|><think>b<|end|>", special=True)
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<|mask|><think>b<|end|>"


def test_names_and_sizes(tokenizer, truth):
    size = truth.get_vocab_size()
    assert tokenizer.vocab_size == size
    assert tokenizer.special_ids == {size - 3, size - 2}
    assert tokenizer.id_of("<think>") == size - 1
    assert tokenizer.token_of(size - 1) == "<think>"
    assert tokenizer.id_of("no such token") is None
    assert [tokenizer.token_of(i) for i in (size, -1, 1 << 40)] == [None] * 3


def test_no_post_processor_truncation_or_padding_is_applied(tmp_path):
    made = library()
    end = made.token_to_id("<|end|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", end)]
    )
    made.enable_truncation(2)
    made.enable_padding(length=64)
    loaded = Tokenizer.load(save(tmp_path, made))
    for special in (False, True):
        assert loaded.encode("the cat sat", special) == library().encode("the cat sat").ids


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="character 1"):
        tokenizer.encode("a\ud83d")


def test_special_token_inside_the_vocabulary_and_merges_stays_text(tmp_path):
    """Llama 3's `ignore_merges` would find the whole word in the vocabulary."""
    vocab = {letter: i for i, letter in enumerate(LETTERS)}
    vocab |= {"<s": 256, "<s>": 257}
    merges = [("<", "s"), ("<s", ">")]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    loaded = Tokenizer.load(save(tmp_path, made))
    assert loaded.encode("<s>", special=True) == [257]
    assert loaded.encode("<s>") == [256, vocab[">"]]


def test_special_token_of_a_unigram_vocabulary_stays_text(tmp_path):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<", -2.0), ("/", -2.0), ("s", -2.0), (">", -2.0)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.add_special_tokens(["<unk>", "</s>"])
    loaded = Tokenizer.load(save(tmp_path, made))
    assert loaded.encode("</s>", special=True) == [1]
    assert loaded.encode("</s>") == [2, 3, 4, 5]


# Folders of other shapes


def slow_folder(folder: Path, **config: object) -> Path:
    """Worked by hand: the 256 letters, then "he", " he" (written "Ġhe") and two added tokens."""
    vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"he": 256, "Ġhe": 257}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nĠ he\n", "utf-8")
    (folder / "added_tokens.json").write_text('{"<|end|>": 258, "<tool>": 259}', "utf-8")
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_vocab_and_merges(tmp_path):
    loaded = Tokenizer.load(slow_folder(tmp_path))
    letter = {text: LETTERS.index(text) for text in "12<|"}
    assert loaded.encode("he he") == [256, 257]
    assert loaded.encode("he<|end|><tool>", special=True) == [256, 258, 259]
    assert loaded.encode("<|") == [letter["<"], letter["|"]]
    assert loaded.special_ids == {258}
    assert loaded.vocab_size == 260
    assert loaded.decode([256, 258, 257, 259]) == "he he<tool>"


def test_vocab_and_merges_normalise_as_the_tokenizer_class_does(tmp_path):
    """Qwen2 composes characters (NFC), GPT-2 leaves them: "é" is 2 bytes, "e" + accent 3."""
    assert len(Tokenizer.load(slow_folder(tmp_path)).encode("e\u0301")) == 2
    gpt2 = slow_folder(tmp_path, tokenizer_class="GPT2Tokenizer")
    assert len(Tokenizer.load(gpt2).encode("e\u0301")) == 3


def test_added_tokens_decoder_names_tokens_and_flags(tmp_path):
    (folder := slow_folder(tmp_path)).joinpath("added_tokens.json").unlink()
    entries = {
        "259": {"content": "<tool>", "special": True, "lstrip": True},
        "258": {"content": "<|end|>", "special": False},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    loaded = Tokenizer.load(folder)
    assert loaded.special_ids == {258, 259}  # 258 because special_tokens_map.json names it
    assert loaded.encode("he  <tool>", special=True) == [256, 259]


def test_config_may_mark_a_token_of_tokenizer_json_as_special(tmp_path):
    folder = save(tmp_path, library())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<think>"}')
    loaded = Tokenizer.load(folder)
    assert loaded.id_of("<think>") in loaded.special_ids
    assert loaded.decode(loaded.encode("a<think>", special=True)) == "a"


def broken(**files: str) -> dict[str, str]:
    return {name.replace("__", "."): text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer"),
        (broken(vocab__json="{}"), "has no tokenizer"),
        (broken(tokenizer__json="version https://git-lfs.github.com/spec"), "read as JSON"),
        (broken(tokenizer__json="[1]"), "JSON object"),
        (broken(tokenizer__json="{}"), "no model"),
        (broken(tokenizer__json='{"model": {"type": "BPE"}}'), "not a usable tokenizer"),
        (broken(vocab__json='{"a": 0}', merges__txt="a b\n"), "not a usable tokenizer"),
        (broken(vocab__json='{"a": 0}', merges__txt="", added_tokens__json='{"<x>": 9}'), "id 9"),
    ],
)
def test_damaged_folder_gives_one_sentence(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


# The detokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What the detokenizer gives for ids that come in groups of these sizes, again and again."""
    detokenizer, given, start, turn = Detokenizer(tokenizer), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        given.append(detokenizer.add(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*given, detokenizer.finish()]


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)
TEXTS = st.text(st.sampled_from(list("a \n你好世界é😀🇨🇭\ufffd" + FAMILY)), max_size=40)


@given(text=TEXTS | st.text(max_size=20), sizes=SIZES)
@settings(max_examples=60, deadline=None)
def test_text_in_any_split_comes_whole_and_never_half_a_character(tokenizer, text, sizes):
    given = pieces(tokenizer, tokenizer.encode(text), sizes)
    assert "".join(given) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given)


@given(data=st.data(), sizes=SIZES)
@settings(max_examples=60, deadline=None)
def test_any_ids_in_any_split_give_the_decoded_text(tokenizer, data, sizes):
    """Also broken bytes, special tokens between the bytes of a character, and unknown ids."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=90))
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


def test_each_character_comes_with_its_last_byte(tokenizer):
    """One token per byte: nothing, nothing, the character; what precedes it does not wait."""
    ids = [tokenizer.id_of(letter(byte)) for byte in "a你😀".encode()]
    assert pieces(tokenizer, ids, [1]) == ["a", "", "", "你", "", "", "", "😀", ""]
    assert pieces(tokenizer, ids[:3], [2]) == ["a", "", "\ufffd"]


class Counted:
    """A tokenizer that notes the longest list it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner, self.longest = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def decode(self, ids, skip_special=True):
        self.longest = max(self.longest, len(ids))
        return self._inner.decode(ids, skip_special)


@pytest.mark.parametrize("kind", ["text", "special", "broken", "replacement", "half"])
def test_the_work_per_token_does_not_grow(tokenizer, kind):
    ids = {
        "text": tokenizer.encode("the cat 你好 😀" * 40),
        "special": [tokenizer.id_of("<|end|>")] * 400 + tokenizer.encode("x"),
        "broken": [tokenizer.id_of(letter(0x80))] * 400,
        "replacement": tokenizer.encode("\ufffd" * 140),
        "half": [tokenizer.id_of(letter(0xE4))] * 400,
    }[kind]
    counted = Counted(tokenizer)
    assert "".join(pieces(counted, ids, [1])) == tokenizer.decode(ids)
    assert counted.longest < 64


def test_a_space_that_the_decoder_strips_from_the_first_word_only(tmp_path):
    """Words as in SentencePiece, with byte pieces: one bad byte spoils the run that it ends."""
    vocab = {
        "<unk>": 0,
        "▁a": 1,
        "▁b": 2,
        "<0xE4>": 3,
        "<0xBD>": 4,
        "<0xA0>": 5,
        "<0x41>": 6,
        "▁": 7,
    }
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    loaded = Tokenizer.load(save(tmp_path, made))
    assert pieces(loaded, [1, 2, 1], [1]) == ["a", " b", " a", ""]
    assert pieces(loaded, [1, 3, 4, 5, 2], [1]) == ["a", "", "", "", "你 b", ""]
    for ids in ([6, 3, 1], [7, 7, 1, 2], [7, 1], [1, 6, 3], [3, 4, 5, 0, 6]):
        assert "".join(pieces(loaded, ids, [1])) == loaded.decode(ids)
