"""From the prompt of a request to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pagedjax.errors import InvalidRequestError
from pagedjax.server.protocol import ChatMessage
from pagedjax.server.state import ServerState

T = TypeVar("T")


async def in_tokenizer_thread(state: ServerState, function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(state.tokenizing, function)


async def encode_text(state: ServerState, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. InvalidRequestError if the model has no tokenizer or the text is not Unicode."""
    loaded = state.engine.loaded
    return await in_tokenizer_thread(state, lambda: loaded.encode(text, add_special_tokens=add_special_tokens))


async def decode_ids(state: ServerState, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("prompt", "this model has no tokenizer, so its tokens have no text")
    return await in_tokenizer_thread(state, lambda: tokenizer.decode(list(ids)))


def check_ids(field: str, ids: Any, vocab_size: int) -> list[int]:
    """`ids` as they are, if they are a list of token ids; InvalidRequestError names the first that is not."""
    if not isinstance(ids, list):
        raise InvalidRequestError(field, "must be a list of token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError(field, f"must be a list of token ids, got {str(token)[:40]!r}")
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(field, f"token id {token} is not in [0, {vocab_size - 1}]")
    return ids


async def completion_prompts(state: ServerState, prompt: Any, max_prompts: int) -> list[tuple[str | None, list[int]]]:
    """(text or None, token ids) of each prompt: a text, a list of texts, a list of ids or a list of such lists."""
    if isinstance(prompt, str):
        entries: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise InvalidRequestError("prompt", "must be a text, token ids, or a list of either")
    elif prompt and isinstance(prompt[0], int):
        entries = [prompt]
    else:
        entries = prompt
    if not entries:
        raise InvalidRequestError("prompt", "is empty; at least one token is needed")
    if len(entries) > max_prompts:
        raise InvalidRequestError("prompt", f"at most {max_prompts} prompts in one request, got {len(entries)}")
    if not all(isinstance(entry, type(entries[0])) and isinstance(entry, (str, list)) for entry in entries):
        raise InvalidRequestError("prompt", "must be a text, token ids, or a list of either")
    out = []
    for entry in entries:
        text = entry if isinstance(entry, str) else None
        ids = (
            await encode_text(state, text) if text is not None else check_ids("prompt", entry, state.engine.vocab_size)
        )
        if not ids:
            raise InvalidRequestError("prompt", "is empty; at least one token is needed")
        out.append((text, ids))
    return out


def truncated(ids: list[int], keep: int | None) -> list[int]:
    """The last `keep` ids; all of them for None."""
    if keep is None:
        return ids
    if keep < 1:
        raise InvalidRequestError("truncate_prompt_tokens", f"must be at least 1, got {keep}")
    return ids[-keep:]


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as chat templates take them: role and text. Anything but text is refused with its place."""
    out = []
    for i, message in enumerate(messages):
        for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
            if (message.model_extra or {}).get(name):
                raise InvalidRequestError(f"messages.{i}.{name}", "not supported yet")
        if message.role in ("tool", "function"):
            raise InvalidRequestError(f"messages.{i}.role", f"{message.role!r} is not supported yet")
        role = "system" if message.role == "developer" else message.role
        out.append({"role": role, "content": _content(message.content, f"messages.{i}.content")})
    return out


def _content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, "must be a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequestError(
                f"{field}.{i}", f"only parts of type 'text' are supported, got {str(kind)[:40]!r}"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{field}.{i}.text", "must be a text")
        texts.append(part["text"])
    return "".join(texts)


async def encode_chat(
    state: ServerState, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, continue_final_message: bool
) -> list[int]:
    """Token ids of a conversation under the model's chat template. InvalidRequestError where it refuses."""
    plain = plain_messages(messages)
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError("continue_final_message", "needs add_generation_prompt = false")
    return await in_tokenizer_thread(
        state,
        lambda: state.engine.loaded.encode_chat(
            plain, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        ),
    )
