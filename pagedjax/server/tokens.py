"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.responses import Response

from pagedjax.errors import InvalidRequestError
from pagedjax.server.prompts import check_ids, decode_ids, encode_chat, encode_text
from pagedjax.server.protocol import DetokenizeRequest, TokenizeRequest
from pagedjax.server.rendering import json_response
from pagedjax.server.state import ServerState


async def tokenize(state: ServerState, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation under the chat template."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "give either prompt or messages")
    if body.messages is not None:
        ids = await encode_chat(
            state,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    else:
        assert body.prompt is not None
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await encode_text(state, body.prompt, add_special_tokens=special)
    answer = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [state.vocabulary.piece(i) for i in ids]
    return json_response(answer)


async def detokenize(state: ServerState, body: DetokenizeRequest) -> Response:
    ids = check_ids("tokens", body.tokens, state.engine.vocab_size)
    return json_response({"prompt": await decode_ids(state, ids)})
