"""Sends a workload at its times and collects what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Sequence

from tqdm import tqdm

from pagedjax.benchmarking.client import Client
from pagedjax.benchmarking.outcome import Outcome
from pagedjax.benchmarking.workload import BenchRequest

_SPARE_FILES = 64


async def run_load(
    client: Client,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    *,
    max_concurrency: int = 0,
    request_id_prefix: str = "",
    progress: bool = True,
) -> tuple[list[Outcome], float]:
    """Sends every request when it is due, whatever became of the ones before (open loop).

    Args:
      times: seconds after the start, one a request, ascending.
      max_concurrency: most requests in flight; the others wait, which their latency does not count (see
        Outcome.scheduled and .start). 0: no limit.
      request_id_prefix: X-Request-Id is this and the request's number.

    Returns:
      Outcomes in the requests' order, and the seconds from the start to the end of the last one.
    """
    bodies = [client.target.body(request) for request in requests]
    _allow_open_files(max_concurrency or len(requests))
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    bar = tqdm(total=len(requests), desc="Requests", unit="req", disable=not progress)

    async def one(i: int, origin: float) -> Outcome:
        async with gate:
            request_id = f"{request_id_prefix}{i}" if request_id_prefix else ""
            outcome = await client.send(bodies[i], requests[i].prompt_len, origin, request_id)
        outcome.scheduled = times[i]
        bar.update()
        return outcome

    tasks = []
    with bar, _no_collections():
        origin = time.perf_counter()
        for i, due in enumerate(times):
            wait = origin + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(i, origin)))
        outcomes = await asyncio.gather(*tasks)
        return list(outcomes), time.perf_counter() - origin


@contextlib.contextmanager
def _no_collections():
    """What is there already is not looked through by the garbage collector meanwhile: that takes tens of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _allow_open_files(connections: int) -> None:
    """Raises the soft limit of open files for so many connections, as far as the hard limit lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if new > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
