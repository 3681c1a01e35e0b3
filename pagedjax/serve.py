"""Serves a model over HTTP with the OpenAI API.

usage: python -m pagedjax.serve [--config=FILE] [--config.section.field=value ...]

Without arguments it serves SmolLM2-135M-Instruct on 127.0.0.1:8000. Keys for clients come from
--config.server.api_key_file or from the environment variable PAGEDJAX_API_KEYS (separated by commas).

With --config.snapshot.save_on_exit=FOLDER it leaves its prefix cache there when SIGTERM or Ctrl-C ends it; with
--config.snapshot.load=FOLDER it starts with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from pagedjax import command_line
from pagedjax.config import Config

try:
    from pagedjax.server import auth, run
    from pagedjax.server.app import create_app
except ModuleNotFoundError as e:
    command_line.fail(f"the server needs packages that are not installed ({e.name}): pip install 'pagedjax[server]'")


def main(config: Config) -> int:
    """Loads, compiles, listens; returns when a signal or an error ends it."""
    keys = auth.load_keys(config.server)
    auth.check_reachability(config.server, keys)
    bound = run.bind(config.server)
    print(f"pagedjax: loading {config.model.path!r}", flush=True)
    # A moment to import: the checks above answer at once.
    from pagedjax.engine import AsyncEngine, build_engine
    from pagedjax.engine.snapshot_files import check_target

    if config.snapshot.save_on_exit:
        check_target(config.snapshot.save_on_exit)
    engine = AsyncEngine(build_engine(config, interactive=True, progress=True))
    status = asyncio.run(_serve(engine, bound, config, keys))
    if config.snapshot.save_on_exit and status == 0:
        engine.save(config.snapshot.save_on_exit)
        print(f"pagedjax: the prefix cache is saved in {config.snapshot.save_on_exit}", flush=True)
    return status


async def _serve(engine: Any, bound: socket.socket, config: Config, keys: tuple[str, ...]) -> int:
    await engine.start()
    has_template = bool(getattr(engine.tokenizer, "chat_template", None))
    text = _welcome(engine.model_name, run.url_of(bound), bool(keys), has_template)
    return await run.serve(create_app(engine, keys), bound, config.server, lambda: print(text, flush=True))


def _welcome(model: str, url: str, has_keys: bool, has_template: bool) -> str:
    """The address, and a command that can be pasted."""
    body: dict[str, Any] = {"prompt": "The capital of France is"}
    if has_template:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    path = "chat/completions" if has_template else "completions"
    data = json.dumps({"model": model, **body, "max_tokens": 64, "temperature": 0}).replace("'", "'\\''")
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if has_keys else ""
    return (
        f"\npagedjax: {model} is served at {url} (Ctrl-C ends it). Try:\n\n"
        f"curl {url}/v1/{path} \\\n{key}  -H 'Content-Type: application/json' \\\n  -d '{data}'\n"
    )


if __name__ == "__main__":
    command_line.run(main, __doc__ or "")
