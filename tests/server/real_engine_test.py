"""The server around a real engine (a tiny random model over byte tokens): what only both together can get wrong."""

import asyncio
import contextlib
import json
import random
import time

import httpx
import jax.numpy as jnp
import pytest

from pagedjax.config import Config
from pagedjax.engine import AsyncEngine, from_loaded
from pagedjax.generate import Job
from pagedjax.models import Llama
from pagedjax.options import with_overrides
from pagedjax.weights import LoadedModel
from tests.models.harness import random_checkpoint, tiny_spec
from tests.server.fakes import TOKENIZER
from tests.server.harness import error, events, ok, samples
from tests.server.lifecycle_test import connect, request_bytes, running

MODEL_LEN = 256
OPTIONS = {
    "model.dtype": "float32",
    "model.max_model_len": MODEL_LEN,
    "cache.page_size": 8,
    "cache.num_pages": 65,
    "scheduler.max_num_seqs": 8,
    "scheduler.max_num_batched_tokens": 32,
    "runner.lane_buckets": (8,),
    "runner.token_buckets": (32,),
    "runner.max_steps": 8,
    "runner.check_every": 1,
    "runner.compilation_cache": "",
    "seed": 1,
}
PATH = "/v1/completions"
PAGES = 'pagedjax:kv_pages{model_name="tiny",state="%s"}'


@pytest.fixture(scope="module")
def engine():
    spec = tiny_spec(num_layers=2, vocab_size=258, max_position_embeddings=MODEL_LEN)
    model = Llama.load(spec, random_checkpoint(spec, seed=3), jnp.float32)
    loaded = LoadedModel(model, spec, TOKENIZER, "tiny", (TOKENIZER.eos_token_id,))
    return from_loaded(loaded, with_overrides(Config(), OPTIONS), interactive=True, progress=False)


@pytest.fixture(scope="module")
def client(engine):
    served = AsyncEngine(engine)
    asyncio.run(served.start())
    with running(served) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
        assert_clean(client, engine)


def complete(client, **body):
    return ok(client.post(PATH, json={"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}))


def chat(client, **body):
    messages = [{"role": "user", "content": "hi"}]
    return ok(
        client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 24, **body})
    )


def assert_clean(client, engine):
    """Nothing runs, nothing waits, every page is free or cached, and the invariants hold."""
    deadline = time.monotonic() + 10
    while True:
        found = samples(client.get("/metrics").text)
        idle = all(
            found[f'pagedjax:{name}{{model_name="tiny"}}'] == 0
            for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used")
        )
        if idle:
            try:
                broken = engine.runner.check()
                break
            except RuntimeError as error:
                if "deleted" not in str(error):  # else a late request has just been let in: other arrays by now
                    raise
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert found[PAGES % "free"] + found[PAGES % "cached"] == 64
    assert found['pagedjax:compilations_after_warm_up_total{model_name="tiny"}'] == 0
    assert broken == []


def test_a_file_is_continued_as_its_lines_alone(engine, tmp_path):
    """`pagedjax.generate`; comes first, while no server has the engine."""
    lines = [{"prompt": "abc" * (1 + i), "max_tokens": 5 + i, "temperature": 0, "ignore_eos": True} for i in range(6)]

    def run(name, lines):
        source, target = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        Job(engine, progress=False).run(str(source), str(target))
        records = [json.loads(line) for line in target.read_text().splitlines()]
        return [r["outputs"] for r in sorted(records, key=lambda r: r["index"])]

    together = run("all", lines)
    assert together == [run(f"line{i}", [line])[0] for i, line in enumerate(lines)]
    assert [len(outputs[0]["token_ids"]) for outputs in together] == [5, 6, 7, 8, 9, 10]
    assert not engine.runner.check()


def test_a_prompt_list_is_answered_as_its_members_alone(client):
    prompts = ["a", "b" * 16, "c" * 8, "d" * 33]
    alone = [complete(client, prompt=p)["choices"][0]["token_ids"] for p in prompts]
    together = complete(client, prompt=prompts)["choices"]
    assert [c["token_ids"] for c in together] == alone
    assert [c["index"] for c in together] == [0, 1, 2, 3]


def test_a_beam_search_is_the_engines_own(client, engine):
    """By both endpoints; the best comes first, and beams that are not asked for are not counted."""
    body = {"prompt": "search", "max_tokens": 6, "use_beam_search": True, "best_of": 4}
    many = complete(client, **body, n=4)
    ids = [c["token_ids"] for c in many["choices"]]
    assert len({tuple(i) for i in ids}) == 4
    best = complete(client, **body, n=1)
    assert [c["token_ids"] for c in best["choices"]] == ids[:1]
    assert (many["usage"]["completion_tokens"], best["usage"]["completion_tokens"]) == (24, 6)
    answer = chat(client, use_beam_search=True, n=3, max_tokens=5)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert all(c["finish_reason"] == "length" for c in answer["choices"])


def test_streams_are_what_whole_answers_are(client):
    """A random model writes bytes that are no characters, so this covers text that cannot be decoded too."""
    body = {
        "prompt": ["ab", "Příliš žluťoučký 🦊"],
        "n": 2,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 40,
        "logprobs": 2,
    }
    whole = complete(client, **body)
    response = client.post(PATH, json={**body, "ignore_eos": True, "return_token_ids": True, "stream": True})
    texts, ids = [""] * 4, [[], [], [], []]
    for chunk in events(response):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            ids[choice["index"]] += choice["token_ids"]
    assert texts == [c["text"] for c in whole["choices"]]
    assert ids == [c["token_ids"] for c in whole["choices"]]
    assert len({tuple(i) for i in ids}) == 4
    assert whole["usage"]["completion_tokens"] == 160


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_two_tokens_never_shows(client, stream):
    text = complete(client, prompt="stop here", max_tokens=60)["choices"][0]["text"]
    position = next(
        i for i in range(4, len(text) - 4) if "\ufffd" not in text[i : i + 3] and text.index(text[i : i + 3]) == i
    )
    stop = text[position : position + 3]
    body = {
        "prompt": "stop here",
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stop": [stop],
        "stream": stream,
    }
    response = client.post(PATH, json=body)
    choices = [e["choices"][0] for e in events(response)] if stream else ok(response)["choices"]
    assert "".join(c["text"] for c in choices) == text[:position]
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == stop
    kept = complete(client, prompt="stop here", max_tokens=60, stop=[stop], include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == text[: position + 3]


def test_prompt_logprobs_are_the_same_with_and_without_a_cached_prefix(client):
    body = {"prompt": "x" * 17 + "y", "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = complete(client, **body), complete(client, **body)
    one, two = first["choices"][0]["logprobs"], second["choices"][0]["logprobs"]
    assert len(one["tokens"]) == 19
    assert one["token_logprobs"][0] is None
    assert one["token_logprobs"] == pytest.approx(two["token_logprobs"], abs=1e-5)
    scored = complete(client, **{**body, "max_tokens": 0})
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(one["token_logprobs"][:18], abs=1e-5)
    assert scored["usage"]["completion_tokens"] == 0


def test_logprobs_under_a_hard_mask_are_json(client):
    for body in (
        {"temperature": 1, "top_k": 1},
        {"logit_bias": {"5": -100, "6": 100}},
        {"top_p": 1e-9, "temperature": 2},
    ):
        complete(client, prompt="abc", echo=True, logprobs=5, **body)


def test_the_context_ends_where_it_ends(client):
    for length, limit, expected in ((MODEL_LEN - 1, 1, 1), (MODEL_LEN - 1, 10, 1), (MODEL_LEN - 5, 10, 5)):
        answer = complete(client, prompt=[1] * length, max_tokens=limit)
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"
    for length in (MODEL_LEN, MODEL_LEN + 1, 5000):
        error(client.post(PATH, json={"prompt": [1] * length, "max_tokens": 1}), 400, "prompt")


def test_a_request_that_cannot_be_served_does_not_hold_up_the_next(client):
    started = time.monotonic()
    error(client.post(PATH, json={"prompt": "x" * 5000}), 400, "prompt")
    complete(client, prompt="small", max_tokens=2)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("body", [{"prompt": [258]}, {"logit_bias": {"258": 1}}, {"stop_token_ids": [258]}], ids=str)
def test_ids_outside_the_vocabulary_leave_a_neighbour_alone(client, body):
    alone = complete(client, prompt="neighbour", max_tokens=30)["choices"][0]["token_ids"]

    async def both():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as pair:
            good = {
                "prompt": "neighbour",
                "max_tokens": 30,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            return await asyncio.gather(pair.post(PATH, json=good), pair.post(PATH, json={"prompt": "a", **body}))

    good, bad = asyncio.run(both())
    assert ok(good)["choices"][0]["token_ids"] == alone
    assert "258" in error(bad, 400, next(iter(body)))["message"]


def test_top_k_beyond_the_vocabulary_is_off(client):
    for top_k in (0, -1, 259, 2**31 - 1):
        complete(client, prompt="a", top_k=top_k, temperature=1)


def test_cached_tokens_and_salts(client):
    prompt = "the same forty characters, said again and again"
    salted = {"cache_salt": f"{random.random()}"}
    counts = [
        complete(client, prompt=prompt, max_tokens=1, **salted)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts[0] == 0
    assert counts[1] >= 32
    other = complete(client, prompt=prompt, max_tokens=1, cache_salt=f"{random.random()}")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_chat(client):
    answer = chat(client, n=3, seed=7, temperature=1.0, logprobs=True, top_logprobs=3)
    assert len(answer["choices"]) == 3
    assert all(len(c["logprobs"]["content"][0]["top_logprobs"]) == 3 for c in answer["choices"])
    assert answer["usage"]["prompt_tokens"] < 60


def test_a_deadline_that_has_passed_and_one_that_has_not(client):
    late = client.post(PATH, json={"prompt": "late", "max_tokens": 100, "deadline_ms": 0.001, "n": 2})
    assert error(late, 504, "deadline_ms")["code"] == "deadline_exceeded"
    assert complete(client, prompt="late", max_tokens=5, deadline_ms=60_000)["choices"][0]["finish_reason"] == "length"
    ended = samples(client.get("/metrics").text)
    assert ended['pagedjax:request_success_total{finished_reason="deadline",model_name="tiny"}'] == 2


def test_pages_come_back_after_200_clients_vanished(client, engine):
    pick = random.Random(1)
    before = complete(client, prompt="witness", max_tokens=20)["choices"][0]["token_ids"]
    aborted = 'pagedjax:request_success_total{finished_reason="abort",model_name="tiny"}'
    ended = samples(client.get("/metrics").text).get(aborted, 0)
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                body = {
                    "prompt": ["v" * pick.randrange(1, 60)] * pick.choice([1, 1, 2]),
                    "n": pick.choice([1, 1, 2]),
                    "stream": pick.random() < 0.5,
                    "max_tokens": 190,
                    "ignore_eos": True,
                }
                connection = stack.enter_context(connect(str(client.base_url).rstrip("/")))
                connection.sendall(request_bytes(body))
            time.sleep(pick.uniform(0, 0.05))
    assert_clean(client, engine)
    assert samples(client.get("/metrics").text)[aborted] - ended > 50
    assert complete(client, prompt="witness", max_tokens=20)["choices"][0]["token_ids"] == before
