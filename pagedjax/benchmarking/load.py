"""Sends a workload at its times and collects what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
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
    keep_finished: bool = False,
) -> tuple[list[Outcome], float]:
    """Sends every request when it is due, whatever became of the ones before (open loop).

    Args:
      times: seconds after the start, one a request, ascending.
      max_concurrency: most requests in flight; the others wait, which their latency does not count (see
        Outcome.scheduled and .start). 0: no limit.
      request_id_prefix: X-Request-Id is this and the request's number.
      keep_finished: when cancelled (Ctrl-C) return what is finished by then instead, and say so.

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

    tasks: list[asyncio.Task[Outcome]] = []
    with bar, _no_collections():
        origin = time.perf_counter()
        try:
            for i, due in enumerate(times):
                wait = origin + due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(one(i, origin)))
            outcomes = list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            if not keep_finished:
                raise
            outcomes = await _finished(tasks)
            bar.write(
                f"stopped: {len(outcomes)} of {len(requests)} requests are finished, and all that is reported",
                sys.stderr,
            )
        return outcomes, time.perf_counter() - origin


async def _finished(tasks: Sequence[asyncio.Task[Outcome]]) -> list[Outcome]:
    """Ends the tasks of a run that was cancelled; what those returned that had come to their end."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()  # it goes on, to report
    for request in tasks:
        request.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [outcome for outcome in ended if isinstance(outcome, Outcome)]


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
