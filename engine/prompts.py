"""Prompts from a file: one JSON object a line (`.jsonl`: "text" or "tokens"), or plain text, one prompt a line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrace.tracer.errors import UserError

__all__ = ["read_prompts"]


def read_prompts(path: Path, target: Path) -> list[tuple[int, ...]]:
    """Token ids of every prompt; text goes through the target's chat template where it has one.

    Raises UserError for a file that is missing or empty, a line that is no prompt, or text without a tokenizer.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # splitlines knows more ends of line than JSON does
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error}); expected one prompt a line") from error
    if not any(line.strip() for line in lines):
        raise UserError(f"{path}: no prompt in it; expected one prompt a line (text, or JSON with 'text' or 'tokens')")
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(_encode(texts, target) if texts else ())
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


def _parse(path: Path, number: int, line: str) -> str | tuple[int, ...]:
    if path.suffix != ".jsonl":
        return line.removesuffix("\r")
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{path}:{number}: not valid JSON ({error}); expected an object with 'text' or 'tokens'"
        ) from error
    match entry:
        case {"tokens": [int(), *_] as tokens} if all(type(token) is int for token in tokens):
            return tuple(tokens)
        case {"text": str(text)} if text and _is_text(text):
            return text
    raise UserError(f"{path}:{number}: neither a non-empty 'text' nor a list of 'tokens' in this line")


def _is_text(text: str) -> bool:
    """Whether it is more than half a character: JSON can spell lone surrogates, tokenizers refuse them."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _encode(texts: Sequence[str], target: Path) -> list[tuple[int, ...]]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise UserError(f"{target}: no tokenizer in it, so prompts must be given as 'tokens' ({error})") from error
    if not tokenizer.chat_template:
        return [tuple(tokenizer(text)["input_ids"]) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]
