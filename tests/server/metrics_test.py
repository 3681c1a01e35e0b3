"""/metrics: the engine's gauges as they are, counters and histograms of what was served."""

import asyncio
import dataclasses

from tests.server.fakes import FakeAsyncEngine
from tests.server.harness import events, get, ok, post, samples, with_client

MODEL = 'model_name="fake"'


def test_gauges_show_the_engine_at_the_moment_of_the_scrape():
    engine = FakeAsyncEngine(script=lambda r, i: "x" * 100, delay=0.01, max_running=2)

    async def work(client):
        async def scrape():
            return samples((await client.get("/metrics")).text)

        idle = await scrape()
        jobs = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 30}))
            for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        busy = await scrape()
        await asyncio.gather(*jobs)
        return idle, busy, await scrape()

    idle, busy, after = with_client(engine, work)
    assert busy[f"pagedjax:num_requests_running{{{MODEL}}}"] == 2
    assert busy[f"pagedjax:num_requests_waiting{{{MODEL}}}"] == 1
    assert busy[f"pagedjax:kv_pages_used{{{MODEL}}}"] == 6
    assert busy[f"pagedjax:kv_cache_usage_perc{{{MODEL}}}"] == 0.06
    assert busy[f'pagedjax:kv_pages{{{MODEL},state="active"}}'] == 6
    for found in (idle, after):
        assert found[f"pagedjax:num_requests_running{{{MODEL}}}"] == 0
        assert found[f"pagedjax:kv_pages_used{{{MODEL}}}"] == 0
        assert found[f"pagedjax:kv_pages_cached{{{MODEL}}}"] == 7
        assert found[f"pagedjax:host_pages{{{MODEL}}}"] == 9
        assert found[f"pagedjax:host_pages_used{{{MODEL}}}"] == 3
    assert busy[f"pagedjax:kv_sharing_ratio{{{MODEL}}}"] == 0.25
    assert busy[f'pagedjax:kv_owned_share{{{MODEL},part="reserved"}}'] == 0.25
    assert busy[f'pagedjax:kv_pool_share{{{MODEL},part="free"}}'] == 0.5
    assert busy[f"pagedjax:forks_total{{{MODEL}}}"] == 3
    assert busy[f"pagedjax:page_copies_total{{{MODEL}}}"] == 2
    states = [v for k, v in busy.items() if k.startswith("pagedjax:kv_pages{")]
    assert sum(states) == busy[f"pagedjax:kv_pages_usable{{{MODEL}}}"]
    assert after[f'pagedjax:request_success_total{{finished_reason="stop",{MODEL}}}'] == 3


def test_histograms_count_what_was_served():
    engine = FakeAsyncEngine()

    async def work(client):
        ok(await client.post("/v1/completions", json={"prompt": "abc", "n": 2}))
        events(await client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True, "max_tokens": 3}))
        await client.post("/v1/completions", json={"prompt": "a", "temperature": 9})
        await client.get("/made/up/path")
        return samples((await client.get("/metrics")).text)

    found = with_client(engine, work)
    assert found[f"pagedjax:time_to_first_token_seconds_count{{{MODEL}}}"] == 3
    assert found[f"pagedjax:e2e_request_latency_seconds_count{{{MODEL}}}"] == 3
    assert found[f"pagedjax:request_prompt_tokens_sum{{{MODEL}}}"] == 5
    assert found[f"pagedjax:request_generation_tokens_sum{{{MODEL}}}"] == 12 + 3 + 3
    assert found[f"pagedjax:request_params_n_sum{{{MODEL}}}"] == 4
    assert found[f"pagedjax:inter_token_latency_seconds_count{{{MODEL}}}"] == 5 + 2 + 2
    assert found['pagedjax:http_requests_total{path="/v1/completions",status="200"}'] == 2
    assert found['pagedjax:http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert found['pagedjax:http_requests_total{path="other",status="404"}'] == 1


def test_unknown_fields_are_counted():
    async def work(client):
        ok(await client.post("/v1/completions", json={"prompt": "a", "wibble": 1, "wobble": 2}))
        return samples((await client.get("/metrics")).text)

    assert with_client(FakeAsyncEngine(), work)["pagedjax:ignored_request_fields_total"] == 2


def test_two_servers_in_one_process_do_not_mix():
    first, second = FakeAsyncEngine(), FakeAsyncEngine()
    ok(post(first, "/v1/completions", {"prompt": "a"}))
    text = get(second, "/metrics").text
    assert samples(text)[f"pagedjax:e2e_request_latency_seconds_count{{{MODEL}}}"] == 0
    assert "python_gc" not in text


def test_every_statistic_that_is_read_exists():
    from pagedjax.engine import EngineStats

    fields = {f.name for f in dataclasses.fields(EngineStats)}
    assert set(vars(FakeAsyncEngine().stats())) <= fields
