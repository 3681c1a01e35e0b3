"""A model in memory with all that serving it needs to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from pagedjax.errors import InvalidRequestError
from pagedjax.models import ModelSpec


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What `load_model` returns.

    Attributes:
      model: the weights (pagedjax.models), on the default device.
      spec: what the model is.
      tokenizer: transformers' interface (PreTrainedTokenizerFast); None where the model came without one.
      name: what clients may call it.
      eos_token_ids: ids that end a sequence; empty where nothing says.
    """

    model: nnx.Module
    spec: ModelSpec
    tokenizer: Any
    name: str
    eos_token_ids: tuple[int, ...] = ()

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of `encode_chat`, None where the model has none."""
        return getattr(self.tokenizer, "chat_template", None)

    @property
    def bos_token_id(self) -> int | None:
        return getattr(self.tokenizer, "bos_token_id", None)

    @property
    def adds_bos(self) -> bool:
        """Whether plain text is given a beginning-of-sequence token, by the model's own rule."""
        return self.bos_token_id is not None and self._tokenizer("prompt").encode("")[:1] == [self.bos_token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text; BOS is added where the model's own rule says so, and never doubled.

        Raises:
          InvalidRequestError: the model has no tokenizer, or the text is not valid Unicode.
        """
        tokenizer = self._tokenizer("prompt")
        try:
            ids = list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError("prompt", f"cannot be encoded: {error}") from None
        return self._one_bos(ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """Token ids of a conversation, with exactly one BOS where the model uses one.

        Args and errors: see `render_chat`.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **template_arguments,
        )
        ids = self.encode(text, add_special_tokens=False)
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)  # type: ignore[arg-type]
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_arguments: Any,
    ) -> str:
        """The conversation as text, by transformers' sandboxed Jinja.

        Args:
          messages: dicts with `role` and `content`.
          tools: function descriptions for templates that know tools.
          add_generation_prompt: end with the opening of the assistant's turn.
          chat_template: takes the place of the model's own.
          template_arguments: further variables of the template.

        Raises:
          InvalidRequestError: no tokenizer, no template, or the template refuses the messages.
        """
        tokenizer = self._tokenizer("messages")
        if not (chat_template or self.chat_template):
            raise InvalidRequestError(
                "messages",
                f"model {self.name!r} has no chat template; send plain prompts, or configure a chat template",
            )
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tokenize=False,
                **template_arguments,
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise InvalidRequestError("messages", f"the chat template refuses them: {error}") from error

    def _tokenizer(self, field: str) -> Any:
        if self.tokenizer is None:
            raise InvalidRequestError(field, f"model {self.name!r} has no tokenizer; send token ids")
        return self.tokenizer

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids
