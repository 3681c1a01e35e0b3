"""A plan on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from pagedjax.planning.plan import Plan, Question

GIB = 2**30
_HEADINGS = {
    "contiguous_max": "max",
    "contiguous_pow2": "pow2",
    "contiguous_oracle": "oracle",
    "chunks": "chunks",
    "paged": "paged",
    "paged_average": "paged,\nmean",
    "paged_prefix": "paged,\nprefix",
}


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps a number of at least 1; whole numbers without a fraction."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.2f} {unit}"


def print_plan(plan: Plan, question: Question, console: Console) -> None:
    """The sizes, then a table of concurrent requests, then what the columns mean."""
    console.print(_sizes(plan, question))
    if plan.lines:
        console.print(_requests(plan))
        console.print(_legend(plan, question), style="dim", highlight=False)


def _sizes(plan: Plan, question: Question) -> Table:
    each = " on each device" if question.devices > 1 else ""
    table = Table(title=f"{plan.model}" + (f", {question.devices} devices" if each else ""), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("parameters", f"{plan.num_parameters / 1e9:.3f} billion")
    if not question.cache_bytes:
        table.add_row(f"memory{each}", size(plan.device_bytes))
        table.add_row("  of which to use", f"{question.fraction:.0%}")
        table.add_row(f"  weights ({question.weight_dtype})", size(plan.weight_bytes))
        table.add_row("  activations, at most", size(plan.activation_bytes))
    table.add_row(
        f"  KV cache ({question.kv_dtype})" + ("" if not question.cache_bytes else each), size(plan.cache_bytes)
    )
    table.add_section()
    table.add_row("a token in one layer", size(plan.bytes_per_token_per_layer))
    table.add_row(f"a token in all {question.shape.num_layers} layers", size(plan.bytes_per_token))
    if plan.layer_groups > 1:
        table.add_row("layer groups, each with pages of its own", str(plan.layer_groups))
        table.add_row("windows (0: all)", ", ".join(map(str, plan.windows)))
    table.add_row(
        f"a page of {plan.page_size} tokens" + (" in one group" if plan.layer_groups > 1 else ""),
        size(plan.bytes_per_page),
    )
    table.add_row("pages (one is reserved)", f"{plan.pages:,}")
    table.add_row("tokens in pages" if plan.layer_groups == 1 else "token slots in pages", f"{plan.slots:,}")
    table.add_row("tokens without pages", f"{plan.contiguous_tokens:,}")
    return table


def _requests(plan: Plan) -> Table:
    table = Table(title="Concurrent requests, and the share of the cache that their tokens take", box=box.SIMPLE_HEAD)
    table.add_column("prompt\n+ out", justify="right")
    table.add_column("pages\neach", justify="right")
    schemes = list(plan.lines[0].requests)
    for scheme in schemes:
        table.add_column(_HEADINGS[scheme], justify="right")
    for line in plan.lines:
        cells = [f"{line.requests[s]:,}\n{line.utilisation[s]:.0%}" for s in schemes]
        table.add_row(f"{line.prompt:,}\n+ {line.output:,}", f"{line.pages:,}", *cells, end_section=True)
    return table


def _legend(plan: Plan, question: Question) -> str:
    text = (
        f"Contiguous memory from a buddy allocator, reserved for {plan.max_len:,} tokens (max), for the output rounded up to a "
        f"power of two (pow2), or for the true length (oracle). chunks: of {question.chunk_tokens} tokens, taken as they fill. "
        "paged: all requests at full length. mean: evenly spread over their outputs, as under steady load."
    )
    if question.shared_prefix:
        text += f" prefix: all begin with the same {question.shared_prefix:,} tokens."
    return text
