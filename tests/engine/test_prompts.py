"""Prompts come as text or tokens, one a line; a line that is none is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spectrace.engine.prompts import read_prompts
from spectrace.tracer.errors import UserError

TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture
def tokenizer(target_of: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A folder with a tokenizer of single characters, with or without a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def save(template: str | None) -> Path:
        inner = Tokenizer(models.WordLevel({char: at for at, char in enumerate("?abc<>!")}, unk_token="?"))
        inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
        wrapped.chat_template = template
        wrapped.save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    return save


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"tokens": [1, 2]}\n\n{"tokens": [3], "note": "kept out"}\n')
    assert read_prompts(path, tmp_path) == [(1, 2), (3,)]


def test_plain_text_is_one_prompt_a_line(tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "p.txt", "ab\n\ncab\n"), tokenizer(None)) == [(1, 2), (3, 1, 2)]


def test_text_goes_through_the_chat_template_and_keeps_its_place_among_tokens(
    tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(tmp_path, "p.jsonl", '{"text": "ab"}\n{"tokens": [9]}\n{"text": "c"}\n')
    assert read_prompts(path, tokenizer(TEMPLATE)) == [(4, 1, 2, 5, 6), (9,), (4, 3, 5, 6)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "p.jsonl:2: not valid JSON"),
        ("[1]", "p.jsonl:2: neither a non-empty 'text' nor a list of 'tokens'"),
        ('{"text": ""}', "p.jsonl:2: neither"),
        ('{"tokens": []}', "p.jsonl:2: neither"),
        ('{"tokens": ["a"]}', "p.jsonl:2: neither"),
        ('{"prompt": "a"}', "p.jsonl:2: neither"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        read_prompts(write(tmp_path, "p.jsonl", f'{{"tokens": [1]}}\n{line}\n'), tmp_path)


def test_a_file_that_cannot_be_read_or_holds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.txt: cannot be read as text"):
        read_prompts(tmp_path / "absent.txt", tmp_path)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"bytes.txt: cannot be read as text"):
        read_prompts(tmp_path / "bytes.txt", tmp_path)
    with pytest.raises(UserError, match=r"blank.txt: no prompt in it"):
        read_prompts(write(tmp_path, "blank.txt", "\n \n"), tmp_path)


def test_text_without_a_tokenizer_is_refused(target_of: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in it, so prompts must be given as 'tokens'"):
        read_prompts(write(tmp_path, "p.txt", "hello\n"), target_of("llama"))


def test_a_wrong_line_is_counted_with_the_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"tokens": [5]}\n\n\n{"tokens": [true]}\n', "utf-8")
    with pytest.raises(UserError, match=r"prompts\.jsonl:4: neither"):
        read_prompts(path, tmp_path)


def test_a_line_ends_where_json_says(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"tokens": [5], "note": "a\u2028b"}\r\n{"tokens": [6]}\r\n', "utf-8")
    assert read_prompts(path, tmp_path) == [(5,), (6,)]
