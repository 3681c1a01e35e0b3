"""Keys, addresses, limits on what is read, and what must not be in answers or logs."""

import asyncio
import dataclasses
import logging

import pytest

from pagedjax.config import Config, ServerConfig
from pagedjax.errors import ConfigError, EngineDeadError, QueueFullError
from pagedjax.server import auth
from pagedjax.server.app import create_app
from tests.server.fakes import FakeAsyncEngine, config
from tests.server.harness import error, get, ok, post, with_client

KEYS = ("alpha-key", "beta-key")
PATH = "/v1/completions"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_health_wants_a_key():
    engine = FakeAsyncEngine()
    routes = [(route.path, method) for route in create_app(engine, KEYS).routes for method in route.methods]
    assert len(routes) > 8

    async def work(client):
        for path, method in routes:
            response = await client.request(method, path.replace("{name:path}", "fake"))
            if path == "/health":
                assert response.status_code == 200
            else:
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"

    with_client(engine, work, KEYS)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer alpha-ke"},
        {"Authorization": "Bearer alpha-key2"},
        {"Authorization": "Basic alpha-key"},
        {"Authorization": "alpha-key"},
        {"Authorization": "Bearer alpha-key,beta-key"},
        {"X-Api-Key": "alpha-key"},
    ],
    ids=str,
)
def test_wrong_keys(headers):
    found = error(post(FakeAsyncEngine(), PATH, {"prompt": "a"}, keys=KEYS, headers=headers), 401)
    assert found["type"] == "authentication_error"
    assert "alpha" not in str(found)


def test_right_keys():
    for key in KEYS:
        ok(post(FakeAsyncEngine(), PATH, {"prompt": "a"}, keys=KEYS, headers=bearer(key)))
    ok(post(FakeAsyncEngine(), PATH, {"prompt": "a"}, keys=KEYS, headers={"Authorization": "bearer  alpha-key"}))


def call(app, raw_path, host=b"server"):
    """The status of a GET whose path is sent exactly so."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    from urllib.parse import unquote

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": unquote(raw_path.decode()),
        "raw_path": raw_path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", host)],
        "server": ("server", 80),
        "client": ("1.2.3.4", 5),
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    "path",
    [
        b"//health",
        b"/health/",
        b"/%68ealth",
        b"/health/../metrics",
        b"/health%2f..%2fmetrics",
        b"/./health",
        b"/HEALTH",
        b"http://x/health",
    ],
)
def test_odd_spellings_of_the_open_path_stay_closed(path):
    app = create_app(FakeAsyncEngine(), KEYS)
    assert call(app, path) == 401
    assert call(app, b"/health") == 200


@pytest.mark.parametrize("host", [b"server/health?", b"/health", b"x/health#", b"", b"health"])
def test_the_host_header_opens_nothing(host):
    assert call(create_app(FakeAsyncEngine(), KEYS), b"/metrics", host) == 401


def test_prefixes_are_shared_within_one_key_only():
    def salts(share):
        engine = FakeAsyncEngine(config(share_prefixes=share))

        async def work(client):
            for key, body in ((0, {}), (0, {}), (1, {}), (0, {"cache_salt": "s"}), (1, {"cache_salt": "s"})):
                ok(await client.post(PATH, json={"prompt": "a", **body}, headers=bearer(KEYS[key])))

        with_client(engine, work, KEYS)
        return [r.cache_salt for r in engine.requests]

    first, again, other, salted, other_salted = salts(False)
    assert first == again
    assert len({first, other, salted, other_salted}) == 4
    assert "alpha" not in first
    first, again, other, salted, other_salted = salts(True)
    assert first == again == other == ""
    assert salted == other_salted == ":s"


def test_keys_come_from_option_file_and_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("from-file\n\n second \n")
    monkeypatch.setenv(auth.KEYS_VARIABLE, "from-env, b")
    keys = auth.load_keys(ServerConfig(api_keys=("a", "b"), api_key_file=str(file)))
    assert keys == ("a", "b", "from-env", "from-file", "second")
    monkeypatch.delenv(auth.KEYS_VARIABLE)
    assert auth.load_keys(ServerConfig()) == ()
    for content in ("", "with space", "na\u00efve"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match="key") as found:
            auth.load_keys(ServerConfig(api_key_file=str(file)))
        assert "space" not in str(found.value).replace("without spaces", "")
    with pytest.raises(ConfigError, match="api_key_file"):
        auth.load_keys(ServerConfig(api_key_file=str(tmp_path / "absent")))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "nowhere.invalid"])
def test_an_address_for_others_needs_a_key(host):
    with pytest.raises(ConfigError, match="allow_open"):
        auth.check_reachability(ServerConfig(host=host), ())
    auth.check_reachability(ServerConfig(host=host), ("k",))
    auth.check_reachability(ServerConfig(host=host, allow_open=True), ())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_loopback_address_needs_none(host):
    auth.check_reachability(ServerConfig(host=host), ())


def test_a_body_over_the_limit_is_refused_while_it_is_read():
    engine = FakeAsyncEngine(config(max_body_bytes=2048))
    assert ok(post(engine, PATH, {"prompt": "a" * 400}))
    error(post(engine, PATH, {"prompt": "a" * 3000}), 413)
    read = 0

    async def parts():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"x" * 512

    async def work(client):
        return await client.post(PATH, content=parts())

    response = with_client(engine, work)
    error(response, 413)
    assert response.headers["connection"] == "close"
    assert read < 10


def test_a_body_that_stalls_is_given_up():
    engine = FakeAsyncEngine(config(receive_seconds=0.1))

    async def parts():
        yield b"{"
        await asyncio.sleep(5)

    async def work(client):
        return await client.post(PATH, content=parts())

    error(with_client(engine, work), 408)


def test_a_full_queue_says_when_to_come_back():
    engine = FakeAsyncEngine()
    engine.generate = _raising(QueueFullError("full"))
    for stream in (False, True):
        response = post(engine, PATH, {"prompt": "a", "stream": stream})
        assert error(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1


def test_a_flood_is_bounded():
    base = Config()
    scheduler = dataclasses.replace(base.scheduler, max_waiting=4)
    engine = FakeAsyncEngine(dataclasses.replace(base, scheduler=scheduler), delay=0.01, max_running=2)

    async def work(client):
        answers = await asyncio.gather(*(client.post(PATH, json={"prompt": "a"}) for _ in range(40)))
        return [a.status_code for a in answers]

    statuses = with_client(engine, work)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) == 6


def _raising(exception):
    async def generate(request):
        raise exception
        yield

    return generate


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine(stream):
    engine = FakeAsyncEngine(script=lambda r, i: "x" * 50)
    engine.generate = _raising(EngineDeadError("the engine has stopped"))
    error(post(engine, PATH, {"prompt": "a", "stream": stream}), 503)
    engine.is_alive = False
    error(post(engine, PATH, {"prompt": "a", "stream": stream}), 503)
    assert get(engine, "/health").status_code == 503


SECRET = "/srv/models/secret.py line 3 at 0x7f3a2b"


@pytest.mark.parametrize("stream", [False, True])
def test_internal_errors_are_not_told_but_can_be_found(stream, caplog):
    engine = FakeAsyncEngine()
    engine.generate = _raising(RuntimeError(SECRET))
    response = post(engine, PATH, {"prompt": "a", "stream": stream}, headers={"X-Request-Id": "my-request-7"})
    found = error(response, 500)
    assert SECRET not in response.text
    assert "RuntimeError" not in response.text
    assert "my-request-7" in found["message"]
    assert response.headers["x-request-id"] == "my-request-7"
    assert any("my-request-7" in r.getMessage() and r.exc_info for r in caplog.records)


def test_an_error_in_the_middle_of_a_stream_is_an_event():
    for raised, status in (
        (RuntimeError(SECRET), "internal"),
        (EngineDeadError("the engine has stopped"), "engine_unavailable"),
    ):
        engine = FakeAsyncEngine()
        engine.fail_after, engine.error = 2, raised
        response = post(engine, PATH, {"prompt": "a", "stream": True})
        assert response.status_code == 200
        *chunks, last = [line for line in response.text.split("\n") if line]
        assert len(chunks) == 2
        assert f'"code":"{status}"' in last
        assert SECRET not in response.text
        assert "[DONE]" not in response.text
        assert not engine.running


@pytest.mark.parametrize("sent", ["x\x1b[31m", "a b", "x" * 65, "ä"])
def test_request_ids_that_are_not_plain_are_replaced(sent):
    async def work(client):
        return await client.get("/health", headers={"X-Request-Id": sent.encode()})

    found = with_client(FakeAsyncEngine(), work).headers["x-request-id"]
    assert found != sent
    assert found.isalnum()


def test_prompts_outputs_and_keys_are_not_logged(caplog):
    caplog.set_level(logging.DEBUG)
    engine = FakeAsyncEngine(script=lambda r, i: "ANSWERTEXT")
    for body in (
        {"prompt": "PROMPTTEXT"},
        {"prompt": "PROMPTTEXT", "n": "PROMPTTEXT"},
        {"prompt": "a", "PROMPT\nTEXT\x1b": 1},
    ):
        for stream in (False, True):
            post(engine, PATH, {**body, "stream": stream}, keys=KEYS, headers=bearer(KEYS[0]))
    get(engine, "/x%0aFORGED%1b[31m", keys=KEYS, headers=bearer(KEYS[0]))
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("pagedjax")]
    assert ours
    for line in ours:
        for word in ("PROMPTTEXT", "ANSWERTEXT", "alpha-key"):
            assert word not in line
        assert line.isprintable()
