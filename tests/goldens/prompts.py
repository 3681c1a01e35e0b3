"""What the goldens are made of: prompts, conversations, strings. After a change here, make the goldens again."""

from __future__ import annotations

import pathlib
import random

_LICENSE = pathlib.Path(__file__).resolve().parents[2] / "LICENSE"

SHORT_TEXTS = {
    "one_token": "The",
    "capital": "The capital of France is",
    "newline": "\n",
    "recipe": "To bake a simple loaf of bread, you need flour, water, salt and yeast. First,",
    "story": "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    "science": (
        "Photosynthesis is the process by which green plants turn light into chemical energy. In the first stage,"
    ),
    "history": (
        "The printing press spread across Europe in the second half of the fifteenth century. By 1500, printers in more"
        " than two hundred and fifty towns had produced millions of books. The most important consequence was"
    ),
    "letter": "Dear Ms. Novak,\n\nthank you for your letter of 3 March. I am writing to let you know that",
    "list": "Five things to check before a long drive:\n1. Tyre pressure\n2. Oil level\n3.",
    "numbers": "1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8, 8 + 8 = 16, 16 + 16 =",
    "repeat": "red green blue red green blue red green blue red green",
    "python": 'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n',
    "c_code": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\tprintf(",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "known_for":',
    "sql": "SELECT customer_id, COUNT(*) AS orders\nFROM orders\nWHERE created_at >= '2024-01-01'\nGROUP BY",
    "markdown": "# Getting started\n\n## Installation\n\nRun the following command:\n\n```bash\npip install",
    "french": "La naïve Élodie préfère le café noir, parce que",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy. Potom",
    "japanese": "日本語のテキストを書くとき、",
    "emoji": "I love rockets 🚀🚀 and flags 🇨🇿 because 👩\u200d🚀",
    "spaces": "   leading   and    many     spaces",
}

CONVERSATIONS = {
    "paris": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You are a terse assistant. Answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "turns": [
        {"role": "user", "content": "My name is Karel and I keep bees."},
        {"role": "assistant", "content": "Nice to meet you, Karel! How many hives do you have?"},
        {"role": "user", "content": "Seven. What is my name, and what do I keep?"},
    ],
    "unicode": [{"role": "user", "content": "Translate to English: «Žluťoučký kůň» 日本 🚀\n\nTake care of   spaces."}],
    "code": [{"role": "user", "content": "Write a Python function that reverses a string.\n```python\n\tpass\n```"}],
    "special": [{"role": "user", "content": "What do <|im_start|> and <|im_end|> mean?"}],
}

# Encoded and decoded by tests of the tokenizer: leading spaces, digits, bytes of split characters, special tokens.
STRINGS = (
    "The capital of France is",
    " two  spaces",
    "  both  ends  ",
    "1234567 + 89",
    "3.14159, 2,000,000 and 0x1F",
    "naïve café",
    "日本語のテキスト",
    "👩\u200d🚀🇨🇿",
    "def f(x):\n\treturn x**2\n",
    "I'm, you're, he'll, THEY'VE, 'tis",
    "\n\n\n  \n\ttabs\t\tand lines\r\n",
    "don't stop-me_now!?...",
    "<|im_start|>user\nhi<|im_end|>",
    "a<|endoftext|>b",
    "مرحبا بالعالم",
    "Привет, мир",
    "e\u0301 against é, ﬁ ligature, ½",
    "https://example.org/a?b=c&d=%20#e",
    "\u00a0non\u2003breaking\u200bzero",
    "AAAAAAAAAAAAAAAAaaaaaaaaaaaaaaaa",
    "१२३ ٤٥٦ ७",
    "\x00\x07\x7f control",
    "x",
    "",
)


def license_text() -> str:
    """About 2,300 tokens of English, already in the repository."""
    return _LICENSE.read_text(encoding="utf-8")


def random_ids(length: int, seed: int, vocab_size: int) -> list[int]:
    """Uniform ids above the special tokens; `random.Random` gives the same ones everywhere."""
    source = random.Random(seed)
    return [source.randrange(17, vocab_size) for _ in range(length)]


def build_prompts(encode, render, vocab_size: int) -> list[dict]:
    """[{name, ids, max_new}]: texts, chats, random ids, and cuts of one long text at lengths around page boundaries."""
    prompts = [{"name": f"text/{name}", "ids": encode(text), "max_new": 48} for name, text in SHORT_TEXTS.items()]
    prompts += [{"name": f"chat/{name}", "ids": render(chat), "max_new": 64} for name, chat in CONVERSATIONS.items()]
    lengths = ((1, 1), (2, 2), (16, 3), (17, 4), (33, 5), (300, 6))
    prompts += [{"name": f"random/{n}", "ids": random_ids(n, seed, vocab_size), "max_new": 32} for n, seed in lengths]
    text_ids = encode(license_text())
    for start, length in ((5, 15), (40, 31), (80, 32), (120, 127), (200, 128), (500, 129), (700, 257), (900, 511)):
        prompts.append({"name": f"cut/{length}", "ids": text_ids[start : start + length], "max_new": 32})
    for start, length in ((0, 1000), (300, 1201), (600, 1500)):
        prompts.append({"name": f"long/{length}", "ids": text_ids[start : start + length], "max_new": 32})
    for prompt in prompts:
        assert prompt["ids"], prompt["name"]
    return prompts


def build_window_prompts(encode, bos: int, vocab_size: int) -> list[dict]:
    """[{name, ids, max_new}] for a model with windows of 512 tokens: on both sides of it, and across it while decoding."""
    names = ("capital", "story", "japanese")
    prompts = [{"name": f"text/{name}", "ids": encode(SHORT_TEXTS[name]), "max_new": 16} for name in names]
    text_ids = encode(license_text())
    for start, length in ((40, 100), (300, 500), (600, 511), (900, 520), (1000, 700)):
        prompts.append({"name": f"cut/{length}", "ids": [bos, *text_ids[start : start + length - 1]], "max_new": 16})
    prompts.append({"name": "long/1300", "ids": text_ids[:1300], "max_new": 16})
    prompts.append({"name": "random/600", "ids": [bos, *random_ids(599, 7, vocab_size)], "max_new": 16})
    for prompt in prompts:
        assert prompt["ids"][0] == bos, prompt["name"]
    return prompts
