"""The simulated serving system in plain Python: one iteration after the other, one request after the other, float64 time.

The rules are those of `pagedjax.simulate`; the code shares none of it. Pages are those of `PagesOracle`, so that also the
prefix cache is decided by lists, and slots are counted one by one.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pagedjax.pages import init_pages
from tests.oracles.baselines_oracle import BuddyOracle, ChunksOracle
from tests.oracles.pages_oracle import PagesOracle

AGING = 16


@dataclasses.dataclass
class Job:
    """A request."""

    rank: int
    arrival: float
    prompt: int
    output: int
    priority: int
    tenant: int
    deadline: float
    text: tuple  # (prefix, prefix_tokens, stream, offset)
    slot: int = -1
    status: str = "waiting"
    generated: int = 0
    left: int = 0
    whole: bool = False
    tail_shared: bool = False
    fork: bool = False
    unpublished: bool = False
    ends: bool = False
    swapped: int = 0
    service: float = 0.0
    first_admitted: int = -1
    first_iteration: int = -1
    last_iteration: int = -1
    first_token: float = math.nan
    latency: float = math.nan
    preemptions: int = 0
    cached: int = 0

    @property
    def known(self):
        return self.prompt + self.generated

    @property
    def held(self):
        return max(self.known - self.left, 0) if self.left else self.known - 1

    def token(self, t):
        prefix, prefix_tokens, stream, offset = self.text
        # Any injective map to 31 bits does: equal texts and positions, equal tokens.
        return (prefix * 2 if t < prefix_tokens else stream * 2 + 1) * 100_000 + (
            t if t < prefix_tokens else t + offset
        )


class SimulateOracle:
    """Runs a workload to its end; `log` has a line for every iteration."""

    def __init__(self, config, workload, num_slots, pages_per_row, width=4):
        self.c, self.n, self.S, self.U = config, config.samples, config.page_size, config.total_pages
        self.K, self.P, self.width = num_slots, pages_per_row, num_slots if config.beams else min(width, num_slots)
        self.paged, self.grows = config.family == "paged", config.family != "buddy"
        self.shares = self.paged and self.n > 1
        self.batch = config.scheme == "faster_transformer"
        self.cost = [float(np.float32(x)) for x in config.cost]
        w = workload
        self.jobs = [
            Job(i, float(w.arrival[i]), int(w.prompt[i]), int(w.output[i]), int(w.priority[i]), int(w.tenant[i]),
                float(np.float32(w.arrival[i] + w.deadline[i])),
                (int(w.prefix[i]), int(w.prefix_tokens[i]), int(w.stream[i]), int(w.offset[i])))
            for i in range(w.num_requests)
        ]  # fmt: skip
        R = num_slots * self.n
        if self.paged:
            pages = init_pages(num_pages=self.U + 1, page_size=self.S, max_rows=R, max_pages_per_row=pages_per_row,
                               secret=(1, 2), num_buckets=None if config.prefix_caching else 1)  # fmt: skip
            self.memory = PagesOracle(pages)
        elif self.grows:
            self.memory = ChunksOracle(self.U, R, pages_per_row)
        else:
            self.memory = BuddyOracle(self.U, max(pages_per_row - 1, 0).bit_length())
        self.slots = [None] * num_slots
        self.now, self.iteration, self.refused, self.noticed = 0.0, 0, False, 0
        self.moved = self.host_used = self.swapped_out = self.swapped_in = self.recomputed = 0
        tenants = int(w.tenant.max()) + 1 if config.policy == "fair_share" else 1
        self.served, self.queued, self.last = [0.0] * tenants, [False] * tenants, 0
        self.bound = {}  # with beams: by rank, the most pages that a request can hold
        self.log, self.sums = [], dict.fromkeys(("tokens", "reserved", "internal", "mapped", "distinct"), 0)
        self.running_seconds = 0.0

    # Counting

    def ceil(self, tokens):
        return -(-tokens // self.S)

    def free(self):
        return len(self.memory.queue) if self.paged else len(self.memory.stack)

    def running(self):
        return [job for job in self.slots if job is not None and not job.ends]

    def decoding(self):
        return [job for job in self.running() if not job.left and job.generated < job.output]

    def shared(self, job):
        return job.prompt // self.S if self.shares else 0

    def total(self, job, tokens):
        return self.shared(job) + self.n * (self.ceil(tokens) - self.shared(job))

    def rows(self, job):
        return [job.slot * self.n + k for k in range(self.n)]

    def table(self, row):
        return self.memory.rows[row][0] if self.paged else self.memory.rows[row]

    def pages(self, job):
        if self.c.beams and job.whole:
            # Which pages beams share is not planned with.
            return self.bound[job.rank]
        return len({page for row in self.rows(job) for page in self.table(row)})

    def expected(self, job):
        more = int(np.float32(self.c.growth_share) * np.float32(job.output - job.generated))
        return max(min(job.known + 1 + more, job.prompt + job.output - 1), 1)

    def outstanding(self):
        return sum(
            max(self.total(job, self.expected(job)) - self.pages(job), 0)
            + (self.n if self.c.beams and job.whole else 0)
            for job in self.running()
        )

    def copies(self, job):
        if not (job.tail_shared and not job.left and job.generated < job.output):
            return 0
        rows = self.rows(job)
        return sum(self.memory.cow_need(rows, [job.held // self.S] * self.n))

    def growth(self, job):
        return self.n * (self.ceil(job.held + 1) - self.ceil(job.held))

    # Order

    def score(self, job):
        left = job.left if job.status == "running" else job.known
        return {
            "first_come": lambda: job.rank,
            "priority": lambda: job.priority,
            "shortest_prefix": lambda: left + AGING * job.rank,
            "fair_share": lambda: job.service if job.status == "running" else self.served[job.tenant],
            "earliest_deadline": lambda: job.deadline,
        }[self.c.policy](), job.rank

    def arrived(self):
        return [job for job in self.jobs if job.arrival <= self.now]

    def waiting(self):
        return [job for job in self.arrived() if job.status == "waiting"]

    # Between iterations

    def settle(self):
        while True:
            flagged = [job for job in self.slots if job is not None and job.unpublished]
            for job in flagged[: self.width]:
                ids = [job.token(t) for t in range(self.P * self.S)]
                self.memory.publish([self.rows(job)[0]], [ids], [job.held], [0])
                job.unpublished = False
            for job in [j for j in self.slots if j is not None and j.fork and not j.unpublished][: self.width]:
                first, *others = self.rows(job)
                self.memory.remap(others, [first] * len(others))
                job.fork = False
            done = [j for j in self.slots if j is not None and j.ends and not j.unpublished and not j.fork]
            rows = [row for job in done[: self.width] for row in self.rows(job)]
            if self.paged:
                self.memory.remap(rows, [self.memory.R] * len(rows))
            elif self.grows:
                self.memory.release(rows)
            else:
                for row in rows:
                    self.memory.release(row)
            for job in done[: self.width]:
                self.slots[job.slot], job.slot, job.ends = None, -1, False
                job.left, job.whole, job.tail_shared = 0, False, False
            if not any(j is not None and (j.ends or j.unpublished or j.fork) for j in self.slots):
                return

    def yield_pages(self):
        while self.grows:
            self.settle()
            need = sum(self.growth(job) + self.copies(job) for job in self.decoding())
            if need <= self.free():
                return
            victim = max(self.running(), key=self.score)
            pages = self.pages(victim)
            if self.c.preemption == "swap" and not victim.left and self.host_used + pages <= self.c.total_host_pages:
                victim.swapped = pages
                self.moved += pages
                self.host_used += pages
                self.swapped_out += pages
            else:
                self.recomputed += victim.held
            victim.status, victim.ends, victim.tail_shared = "waiting", True, False
            victim.preemptions += 1
            victim.unpublished = self.c.prefix_caching
            self.refused, self.noticed = True, len(self.arrived())

    def admit(self):
        if not self.running() or (self.c.policy != "first_come" and len(self.arrived()) > self.noticed):
            self.refused = False
        if self.refused or (self.batch and any(job.generated for job in self.running())):
            return
        if len(self.served) > 1:
            now_queued = [any(job.tenant == t for job in self.waiting()) for t in range(len(self.served))]
            least = min((s for s, q in zip(self.served, self.queued, strict=True) if q), default=self.served[self.last])
            for t, queued in enumerate(now_queued):
                if queued and not self.queued[t]:
                    self.served[t] = max(self.served[t], least)
        while self.waiting():
            job = min(self.waiting(), key=self.score)
            if None not in self.slots or len(self.running()) >= self.c.max_running:
                break
            if self.c.prefix_caching and self.waits_for_prefix(job):
                break
            tokens = 0 if job.swapped else job.known
            prefill = sum(other.left for other in self.running())
            whole = not self.c.chunked_prefill and not self.batch
            if (
                whole
                and tokens
                and prefill
                and prefill + self.n * len(self.decoding()) + tokens > self.c.max_num_batched_tokens
            ):
                break
            if not self.place(job):
                self.refused, self.noticed = True, len(self.arrived())
                break
        if len(self.served) > 1:
            self.queued = [any(job.tenant == t for job in self.waiting()) for t in range(len(self.served))]

    def waits_for_prefix(self, job):
        for other in self.running():
            if other.left:
                limit = min(other.known, job.known - 1)
                common = 0
                while common < limit and job.token(common) == other.token(common):
                    common += 1
                if common // self.S * self.S > other.known - other.left:
                    return True
        return False

    def place(self, job):
        """Whether it found room."""
        job.slot = self.slots.index(None)
        rows, found, first = self.rows(job), 0, job.first_admitted < 0
        alone = not self.running()
        if not self.grows:
            units = self.ceil(self.asked(job))
            ok = self.memory.reserve([[(row, units) for row in rows]])[0]
        else:
            if self.c.prefix_caching and not job.swapped and not (self.shares and job.generated):
                ids = [job.token(t) for t in range(self.P * self.S)]
                found = self.memory.match([rows[0]], [ids], [job.known], [0])[0]
            need = self.total(job, self.expected(job)) - found + (self.n if self.c.beams else 0)
            ok = need <= self.free() - self.outstanding() or alone
            if not ok and found:
                self.memory.remap([rows[0]], [self.memory.R])
        if not ok:
            job.slot = -1
            return False
        apart = self.n > 1 and (job.generated > 0 or not self.shares)
        if self.grows:
            self.give_pages(job, rows, found, apart)
        job.service = self.served[job.tenant if len(self.served) > 1 else 0]
        if first:
            if len(self.served) > 1:
                self.served[job.tenant] += job.prompt - found * self.S
            job.first_admitted, job.cached = self.iteration, found * self.S
        self.last = job.tenant if len(self.served) > 1 else 0
        if job.swapped:
            job.left = 0
            self.moved += job.swapped
            self.host_used -= job.swapped
            self.swapped_in += job.swapped
            job.swapped = 0
        else:
            job.left = job.prompt + self.n * job.generated if apart and job.generated else job.known - found * self.S
        job.status, job.whole, self.slots[job.slot] = "running", apart or self.n == 1, job
        return True

    def give_pages(self, job, rows, found, apart):
        logical = self.ceil(job.known - 1 if job.swapped else job.known)
        if apart:
            assert all(self.memory.alloc([rows[0]], [self.shared(job)]))
            if self.shares:
                self.memory.remap(rows[1:], [rows[0]] * (self.n - 1))
            assert all(self.memory.alloc(rows, [logical - self.shared(job)] * self.n))
        else:
            assert all(self.memory.alloc([rows[0]], [logical - found]))
        if self.c.beams:
            self.bound[job.rank] = self.total(job, logical * self.S) if apart else logical

    def asked(self, job):
        kind, longest = self.c.reservation, self.c.max_model_len
        expected = {"max": longest, "oracle": job.output, "pow2": 1 << (job.output - 1).bit_length()}[kind]
        return min(job.prompt + expected, longest)

    def copy_tails(self):
        for job in self.decoding():
            if job.tail_shared:
                rows = self.rows(job)
                assert all(self.memory.cow(rows, [job.held // self.S] * self.n)[1])
                job.tail_shared = False

    # An iteration

    def chunks(self):
        if not self.c.chunked_prefill:
            return {job.rank: job.left for job in self.running() if job.left}
        budget, out = max(self.c.max_num_batched_tokens - self.n * len(self.decoding()), 0), {}
        for job in sorted(self.running(), key=self.score):
            if job.left:
                out[job.rank] = min(job.left, budget)
                budget -= out[job.rank]
        return {rank: chunk for rank, chunk in out.items() if chunk}

    def seconds(self, chunks):
        fixed, weights, per_token, per_context, per_page, per_pair, per_moved, per_moved_page = self.cost
        decoding = self.decoding()
        lanes = self.n * sum(not job.left for job in self.running())
        reads = [job.held + 1 for job in decoding for _ in range(self.n)]
        pairs = 0.0
        for job in self.running():
            q = chunks.get(job.rank, 0)
            if q:
                reads.append(job.held + q)
                pairs += q * job.held + q * (q + 1) / 2
        pages = sum((read + (self.S - 1) / 2) / self.S for read in reads)
        linear = fixed + max(weights, per_token * (lanes + sum(chunks.values())))
        moved, self.moved = self.moved, 0
        moving = moved * (self.S * per_moved + per_moved_page)
        return linear + per_context * sum(reads) + per_page * pages + per_pair * pairs + moving

    def count_slots(self, done):
        """Of every slot of every page: does it hold a token, will it? `done` by rank: tokens of the first row, of others."""
        if not self.grows:
            for job in self.running():
                first, others, rows = done[job.rank]
                tokens = first + (rows - 1) * others
                self.sums["tokens"] += tokens
                self.sums["reserved"] += self.n * (job.prompt + job.output) - tokens
                self.sums["internal"] += self.n * (self.asked(job) - job.prompt - job.output)
            return
        filled, may, mapped = {}, {}, 0
        for job in self.running():
            final = max(job.prompt + job.output - 1, 1)
            for k, row in enumerate(self.rows(job)):
                for logical, page in enumerate(self.table(row)):
                    mapped += 1
                    for offset in range(self.S):
                        token, slot = logical * self.S + offset, (page, offset)
                        filled[slot] = filled.get(slot, False) or token < done[job.rank][min(k, 1)]
                        may[slot] = may.get(slot, False) or token < final
        self.sums["tokens"] += sum(filled.values())
        self.sums["reserved"] += sum(may[slot] and not filled[slot] for slot in filled)
        self.sums["internal"] += sum(not may[slot] for slot in filled)
        self.sums["mapped"] += mapped
        self.sums["distinct"] += len(filled) // self.S

    def iterate(self):
        chunks = self.chunks()
        decoding = self.decoding()
        seconds = self.seconds(chunks)
        done = {}
        for job in self.running():
            if job in decoding:
                row = self.rows(job)
                if self.grows:
                    more = self.ceil(job.held + 1) - self.ceil(job.held)
                    assert all(self.memory.alloc(row, [more] * self.n))
                    if self.c.beams:
                        self.bound[job.rank] += self.n * more
                done[job.rank] = (job.held + 1, job.held + 1, self.n)
            elif job.left:
                chunk = chunks.get(job.rank, 0)
                now = max(job.known - job.left + chunk, 0)
                rest = now if chunk == job.left else self.shared(job) * self.S
                done[job.rank] = (now, rest, 1)
            else:
                done[job.rank] = (job.held, job.held, self.n)
        self.count_slots(done)
        free = self.free() if self.grows else None
        self.log.append((sorted(j.rank for j in self.running()), dict(chunks), free))
        self.running_seconds += seconds * len(self.running())
        self.now += seconds
        self.iteration += 1
        for job in self.running():
            if job in decoding:
                self.gain(job)
            elif job.rank in chunks:
                job.left -= chunks[job.rank]
                if not job.left:
                    self.gain(job, begins=True)
        self.finish(decoding)

    def gain(self, job, begins=False):
        job.generated += 1
        if len(self.served) > 1:
            self.served[job.tenant] += 2.0
        if begins:
            if job.first_iteration < 0:
                job.first_iteration, job.first_token = self.iteration, self.now - job.arrival
            if self.shares and not job.whole and job.generated < job.output:
                job.fork, job.tail_shared = True, job.prompt % self.S > 0
            job.whole = True
            job.unpublished = self.c.prefix_caching

    def finish(self, decoding):
        through = [job for job in self.running() if not job.left and job.generated >= job.output]
        if self.batch and len(through) < len(self.running()):
            through = []
        for job in through:
            job.status, job.ends, job.unpublished = "finished", True, self.c.prefix_caching
            job.last_iteration, job.latency = self.iteration, self.now - job.arrival
            self.refused = False
        if self.c.beams:
            for job in decoding:
                if not job.ends:
                    parents = self.c.beams[job.generated % len(self.c.beams)]
                    rows = self.rows(job)
                    self.memory.remap(rows, [rows[parent] for parent in parents])
                    job.tail_shared = True

    def run(self):
        while any(job.status != "finished" for job in self.jobs) and self.now < self.c.end:
            self.settle()
            self.yield_pages()
            self.admit()
            if not self.running():
                self.now = min(*(job.arrival for job in self.jobs if job.status == "waiting"), self.c.end)
                continue
            self.copy_tails()
            self.iterate()
        return self
