"""A server around the scripted engine, as a process of its own: `python -m tests.server.scripted_server DRAIN MODE`."""

import asyncio
import sys

from pagedjax.server import run
from pagedjax.server.app import create_app
from tests.server.fakes import FakeAsyncEngine, config


async def main(drain_seconds: float, mode: str) -> int:
    settings = config(port=0, drain_seconds=drain_seconds)
    engine = FakeAsyncEngine(settings, script=lambda r, i: "x" * 40, delay=0.05)
    if mode == "stuck":
        engine.script, engine.max_model_len = (lambda r, i: "x" * 4000), 10**6
    if mode == "dies":
        asyncio.get_running_loop().call_later(0.2, setattr, engine, "is_alive", False)
    bound = run.bind(settings.server)
    return await run.serve(create_app(engine), bound, settings.server, lambda: print(run.url_of(bound), flush=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(float(sys.argv[1]), sys.argv[2])))
