"""The user's prompt file: what is read, and every way in which a line can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd_testkit.prompts import PromptFileError, UserPrompt, load_prompts

pytestmark = pytest.mark.cpu


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_reads_text_and_token_ids(tmp_path: Path) -> None:
    content = '{"text": "Grüße\\n"}\n\n   \n{"token_ids": [0, 7, 7], "name": "mine"}\r\n'
    assert load_prompts(write(tmp_path, content)) == (
        UserPrompt("line-1", text="Grüße\n"),
        UserPrompt("mine", token_ids=(0, 7, 7)),
    )


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    found = load_prompts(write(tmp_path, '{"text": "a\u2028b"}'))
    assert found == (UserPrompt("line-1", text="a\u2028b"),)


def test_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, b'\xef\xbb\xbf{"text": "a"}'))[0].text == "a"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"text": ', "not JSON"),
        ("[1, 2]", "a JSON object is wanted, not a list"),
        ('"text"', "a JSON object is wanted, not a string"),
        ("{}", "exactly one of text and token_ids is wanted, neither is given"),
        ('{"text": "a", "token_ids": [1]}', "exactly one of .* is wanted, both is given"),
        ('{"text": ""}', "text is an empty string"),
        ('{"text": 3}', "text is a number"),
        ('{"text": null}', "text is null"),
        ('{"token_ids": []}', "token_ids is an empty list"),
        ('{"token_ids": "1 2"}', "token_ids is a string"),
        ('{"token_ids": {"a": 1}}', "token_ids is an object"),
        ('{"token_ids": [1, true]}', r"token_ids\[1\] is true"),
        ('{"token_ids": [-1]}', r"token_ids\[0\] is -1"),
        ('{"token_ids": [1, 2.0]}', r"token_ids\[1\] is 2\.0"),
        ('{"token_ids": [1, null]}', r"token_ids\[1\] is null"),
        ('{"text": "a", "name": ""}', "name is an empty string"),
        ('{"text": "a", "name": false}', "name is a boolean"),
        ('{"text": "a", "prompt": "b"}', "unknown key 'prompt'; known are name, text, token_ids"),
        ('{"text": "a", "text": "b"}', "the key 'text' stands twice"),
        ('{"text": "lone \\ud83d half"}', "text holds half of a surrogate pair"),
        ("[" * 100_000, "not JSON of a prompt"),
        ('{"text": "b", "name": "line-1"}', "the name 'line-1' is used by an earlier line"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    path = write(tmp_path, f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(PromptFileError, match=rf"prompts\.jsonl, line 3: {wrong}"):
        load_prompts(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl holds no prompt"):
        load_prompts(write(tmp_path, content))


def test_not_utf_8(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(PromptFileError, match=r"line 2: byte 10 is not UTF-8"):
        load_prompts(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"gone\.jsonl cannot be read: No such file"):
        load_prompts(tmp_path / "gone.jsonl")
    with pytest.raises(PromptFileError, match=r"cannot be read: Is a directory"):
        load_prompts(tmp_path)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "\\ud83d\\ude00"}')
    assert load_prompts(path)[0].text == "\U0001f600"
