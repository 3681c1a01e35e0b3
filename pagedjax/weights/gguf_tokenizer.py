"""A tokenizer from a GGUF file's metadata, without torch: byte-level BPE and SentencePiece vocabularies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagedjax.errors import ModelLoadError
from pagedjax.weights.transformers_quietly import transformers

# Kinds of tokens in `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# Patterns by which text is cut before merges; they belong to the published tokenizers of the model families.
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = _ENDINGS + _LETTERS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + _LETTERS + r"|\p{N}" + _REST
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Pre(NamedTuple):
    """How text is prepared for a byte-level vocabulary. No pattern: GPT-2's own."""

    pattern: str | None = None
    digits: bool = False  # each digit on its own
    nfc: bool = False
    whole_words: bool = False  # a word that is a token as it stands is not merged (ignore_merges)
    bos: bool = False  # BOS is added where the file does not say


_GPT2_PRE = _Pre()
_PRE = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais", "trillion", "exaone4"), _GPT2_PRE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Pre(digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _Pre(_LLAMA3, whole_words=True, bos=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Pre(_QWEN2, nfc=True)),
    "tekken": _Pre(_TEKKEN, whole_words=True, bos=True),
}

# End-of-turn tokens of chat models; one that is in the vocabulary as a control token ends a sequence too.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


def build_tokenizer(metadata: Mapping[str, Any], path: str) -> Any:
    """The file's tokenizer as transformers' PreTrainedTokenizerFast, or None where the file has none.

    Raises:
      ModelLoadError: a kind of vocabulary or of pre-tokenizer that is not supported, or contradictory metadata.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"{path}: the tokenizer has no list of tokens (tokenizer.ggml.tokens)")
    kinds = _numbers(metadata, "token_type", len(tokens), path)
    if kind == "gpt2":
        tokenizer, default_bos = _byte_level(metadata, _distinct(tokens), path)
    elif kind == "llama":
        tokenizer, default_bos = _sentencepiece(metadata, _distinct(tokens), kinds, path), True
    else:
        raise ModelLoadError(f"{path}: unsupported tokenizer {kind!r}; supported are gpt2 (byte-level BPE) and llama")
    _add_tokens(tokenizer, tokens, kinds)
    special = special_tokens(metadata, len(tokens), path)
    names = {name: tokens[special[key]] for name, key in _NAMED.items() if key in special}
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)) and "bos_token" in names
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in names
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        clean_up_tokenization_spaces=False,
        model_max_length=context if isinstance(context, int) and context > 0 else int(1e30),
        **({"chat_template": metadata["tokenizer.chat_template"]} if metadata.get("tokenizer.chat_template") else {}),
        **names,
    )


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def special_tokens(metadata: Mapping[str, Any], num_tokens: int, path: str) -> dict[str, int]:
    """Ids of the special tokens that the metadata names: bos, eos, eot, eom, unknown, padding."""
    out = {}
    for key in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None or value == 0xFFFFFFFF:  # -1 in an unsigned field: none
            continue
        if not isinstance(value, int) or not 0 <= value < num_tokens:
            raise ModelLoadError(f"{path}: tokenizer.ggml.{key}_token_id = {value!r} is not below {num_tokens} tokens")
        out[key] = value
    return out


def eos_ids(metadata: Mapping[str, Any], path: str) -> tuple[int, ...]:
    """The ids that end a sequence: what the metadata names, and control tokens that end a turn of a chat."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        value = metadata.get("tokenizer.ggml.eos_token_id")
        return (value,) if isinstance(value, int) and value != 0xFFFFFFFF else ()
    special = special_tokens(metadata, len(tokens), path)
    found = [special[key] for key in ("eos", "eot", "eom") if key in special]
    kinds = _numbers(metadata, "token_type", len(tokens), path)
    if kinds is not None:
        found += [i for i in np.flatnonzero(kinds == _CONTROL).tolist() if tokens[i] in _END_OF_TURN]
    return tuple(dict.fromkeys(found))


def _numbers(metadata: Mapping[str, Any], key: str, count: int, path: str) -> np.ndarray | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or len(values) != count:
        raise ModelLoadError(f"{path}: tokenizer.ggml.{key} must hold {count} numbers, one a token")
    return values


def _distinct(tokens: Sequence[str]) -> dict[str, int]:
    """token -> id. A text that occurs twice keeps its first id; later ids get unused names, so that none is missing."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab[token if token not in vocab else f"[unused {index} {token}]"] = index
    return vocab


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], path: str) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE:
        raise ModelLoadError(f"{path}: unsupported pre-tokenizer {name!r}; supported are {', '.join(sorted(_PRE))}")
    if name == "default":
        logging.getLogger(__name__).warning("%s does not say how its tokenizer cuts text; taking GPT-2's pattern", path)
    pre = _PRE[name]
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError(f"{path}: a byte-level tokenizer without merges (tokenizer.ggml.merges)")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left in vocab and right in vocab and left + right in vocab:
            pairs.append((left, right))
        else:
            raise ModelLoadError(f"{path}: the tokenizer's merge {merge!r} is not made of tokens")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cut: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.pattern is None:
        cut.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        cut.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
        cut.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.bos


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], kinds: np.ndarray | None, path: str
) -> Tokenizer:
    """SentencePiece's BPE. Its merges are every split of a token into two tokens, the highest-scored token first."""
    scores = _numbers(metadata, "scores", len(vocab), path)
    if scores is None or kinds is None:
        raise ModelLoadError(f"{path}: a SentencePiece tokenizer without scores or token types")
    unknown = np.flatnonzero(kinds == _UNKNOWN)
    texts = list(vocab)
    model = models.BPE(
        vocab=vocab,
        merges=_implied_merges(vocab, scores, kinds),
        unk_token=texts[int(unknown[0])] if len(unknown) else None,
        fuse_unk=True,
        byte_fallback=bool(np.any(kinds == _BYTE)),
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return tokenizer


def _implied_merges(vocab: Mapping[str, int], scores: np.ndarray, kinds: np.ndarray) -> list[tuple[str, str]]:
    pairs = []
    score_of, mergeable = scores.tolist(), np.isin(kinds, (1, 5)).tolist()
    for token, index in vocab.items():
        if len(token) < 2 or not mergeable[index]:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-score_of[index], index, left, right, cut, token))
    pairs.sort()
    return [(token[:cut], token[cut:]) for *_, cut, token in pairs]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: np.ndarray | None) -> None:
    """Control and user-defined tokens are found whole in text; the former are the special ones, skipped on request."""
    if kinds is None:
        return
    pick = lambda kind: [tokens[i] for i in np.flatnonzero(kinds == kind).tolist() if tokens[i]]  # noqa: E731
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in pick(_CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in pick(_USER_DEFINED)])
