"""Tokenizer and chat template from the metadata of a GGUF file
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dinfer.errors import CheckpointError
from dinfer.registry import near
from dinfer.text.chat import ChatTemplate
from dinfer.text.tokenizer import FLAGS, QWEN2_WORDS, Json, Tokenizer, byte_level

# Published pre-tokenizer patterns; Llama 3's takes up to three digits together, Ling's is LLaDA's.
_LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_LING_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
FRAMES: dict[str, Json] = {
    "gpt-2": {"words": None},
    "qwen2": {"words": QWEN2_WORDS, "nfc": True},
    "llama-bpe": {"words": _LLAMA3_WORDS},
    "bailingmoe": {"words": _LING_WORDS},
    "bailingmoe2": {"words": _LING_WORDS},
    "llada-moe": {"words": _LING_WORDS},
    "smollm": {"words": None, "digits": True},
}
"""How texts are split, by `tokenizer.ggml.pre`."""
_CONTROL, _USER, _UNUSED = 3, 4, 5
_ROLES = {"unknown": "unk", "seperator": "sep", "padding": "pad"}  # spelt so in the format
_ENDS = ("eos", "eot", "eom")


def tokenizer_of(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The byte-level BPE of a file; None where it has no vocabulary. Raises CheckpointError for
    one that is not supported.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    if kind != "gpt2":
        raise CheckpointError(
            f"{path} has a tokenizer of the kind {kind!r}; only 'gpt2' (byte-level BPE) is"
            " supported."
        )
    if pre not in FRAMES:
        raise CheckpointError(
            f"{path} splits words as {pre!r}, which is not supported.{near(pre, sorted(FRAMES))}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    numbered = list(zip(range(len(tokens)), tokens, kinds, strict=True))
    document = byte_level(**FRAMES[pre])
    document["model"] |= {
        "vocab": {token: id for id, token, kind in numbered if kind != _UNUSED},
        "merges": [pair.split(" ") for pair in metadata.get("tokenizer.ggml.merges", [])],
        "ignore_merges": pre == "llama-bpe",
    }
    added = [
        FLAGS | {"id": id, "content": token, "special": kind == _CONTROL}
        for id, token, kind in numbered
        if kind in (_CONTROL, _USER)
    ]
    return Tokenizer.of(document, added, str(path))


def template_of(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template; None where the file holds none."""
    source, tokens = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens")
    named = {f"{role}_token": tokens[id] for role, id in special_ids(metadata).items() if tokens}
    others = metadata.get("tokenizer.chat_templates") or ()
    further = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in others}
    held = {name: text for name, text in further.items() if isinstance(text, str)}
    return ChatTemplate(source, named, held) if isinstance(source, str) else None


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of tokens by role, such as `eos`."""
    lead, tail = "tokenizer.ggml.", "_token_id"
    found = {
        key.removeprefix(lead).removesuffix(tail): id
        for key, id in metadata.items()
        if key.startswith(lead) and key.endswith(tail)
    }
    return {_ROLES.get(role, role): id for role, id in found.items()}


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: of the text, of a turn, of a message."""
    known = special_ids(metadata)
    return [known[role] for role in _ENDS if role in known]
