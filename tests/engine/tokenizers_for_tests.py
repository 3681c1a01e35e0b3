"""Small tokenizers of the kinds that models have, built here so that no file is needed."""

import functools

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|start|>", "<|end|>"]
PLAIN_ADDED = ["<tool call>", " leading"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox doesn't.\n\n",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 今日は良い天気ですね。 안녕하세요 🙂👩‍👩‍👧 done",
    "  two spaces,   three;\tand a tab. l'été - naïve café … \u00a0nbsp \ufffd kept",
]


def _add(tokenizer):
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in PLAIN_ADDED])
    return tokenizer


@functools.cache
def byte_level():
    """Byte-level BPE (GPT-2, Llama 3, SmolLM, Qwen): every byte is a token, some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([t for t in TEXTS for _ in range(2)], trainer)
    return _add(tokenizer)


def _sentencepiece_vocabulary():
    words = [
        "▁",
        "▁▁",
        "▁The",
        "The",
        "▁fox",
        "fox",
        "▁jumps",
        ".",
        ",",
        "▁l",
        "é",
        "▁žlu",
        "e",
        "s",
        "▁▁▁▁",
        "好",
        "\n",
    ]
    return ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], *words]


@functools.cache
def sentencepiece():
    """SentencePiece with byte fallback, as Llama 2, Mistral and Gemma have it. Only its decoding is of use here."""
    vocabulary = {token: i for i, token in enumerate(_sentencepiece_vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _add(tokenizer)


@functools.cache
def metaspace():
    """SentencePiece in its older form, without byte tokens."""
    words = _sentencepiece_vocabulary()[257:]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(words)}, unk_token="."))
    tokenizer.decoder = decoders.Metaspace()
    return _add(tokenizer)


@functools.cache
def wordpiece():
    """A decoder that looks at neighbours, so that the window is needed."""
    words = ["[UNK]", "the", "fox", "##es", "jump", "##ed", ".", "žlu", "##ť", "好"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _add(tokenizer)


@functools.cache
def windowed_sentencepiece():
    """SentencePiece behind a decoder that is not recognised: the window has to get the same right."""
    tokenizer = Tokenizer.from_str(sentencepiece().to_str())
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("never"), ""), *parts])
    return tokenizer


def wrapped(tokenizer):
    """The same as transformers has it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
