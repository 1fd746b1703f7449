"""The byte tokenizer of the built-in models: token id = byte value + ``BYTE_OFFSET``.

The tokenizer files are plain JSON, so that no tokenizer library is needed to write them
and every library version reads the same ones.
"""

from __future__ import annotations

from typing import Any

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<model>", "<end>", "<sep>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
BYTE_OFFSET = len(SPECIALS)
NUM_TOKENS = BYTE_OFFSET + 256


def byte_tokens(text: str) -> tuple[int, ...]:
    """Token ids of the UTF-8 bytes of ``text``; no special token is added."""
    return tuple(byte + BYTE_OFFSET for byte in text.encode("utf-8"))


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves, the others take the code points from 256
    upwards in byte order; this is the alphabet of every byte-level tokenizer file.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 256
    for byte in range(256):
        if byte in own:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """File name to JSON content of the tokenizer: byte-level BPE without a single merge."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    byte_level["use_regex"] = False
    vocabulary = {symbol: BYTE_OFFSET + byte for byte, symbol in enumerate(byte_symbols())}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": index, "content": name, **flags, "special": True}
                for index, name in enumerate(SPECIALS)
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {name: index for index, name in enumerate(SPECIALS)} | vocabulary,
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
            "pad_token": SPECIALS[PAD_ID],
            "bos_token": SPECIALS[BOS_ID],
            "eos_token": SPECIALS[EOS_ID],
            "unk_token": "<unk>",
        },
    }
