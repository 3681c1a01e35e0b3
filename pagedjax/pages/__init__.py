"""Page management as pure functions over one immutable value, `Pages`.

    pages, result = verb(pages, rows, ...)

Every verb is vectorised over rows, works the same eagerly, under `jax.jit` (donate `pages`) and under `jax.vmap`, costs
O(rows + pages touched) however many pages there are, and reports what could not be done as a value. Rows are listed in
arrival order and padded with R, one past the last row.
"""

from pagedjax.pages.adopt import adopt
from pagedjax.pages.alloc import alloc
from pagedjax.pages.compact import compact, contiguity
from pagedjax.pages.cow import cow, cow_need
from pagedjax.pages.invariants import check
from pagedjax.pages.lookup import physical_page, physical_slot, row_pages
from pagedjax.pages.prefix import match
from pagedjax.pages.publish import publish
from pagedjax.pages.references import pin, unpin
from pagedjax.pages.remap import remap
from pagedjax.pages.reserve import check_adjoining, reserve
from pagedjax.pages.state import NULL_PAGE, Pages, PageStats, init_pages, stats
from pagedjax.pages.usage import Usage, owned_shares, pool_shares, sharing_ratio, usage
from pagedjax.pages.window import first_needed, slide

__all__ = [
    "NULL_PAGE",
    "PageStats",
    "Pages",
    "Usage",
    "adopt",
    "alloc",
    "check",
    "check_adjoining",
    "compact",
    "contiguity",
    "cow",
    "cow_need",
    "first_needed",
    "init_pages",
    "match",
    "owned_shares",
    "physical_page",
    "physical_slot",
    "pin",
    "pool_shares",
    "publish",
    "remap",
    "reserve",
    "row_pages",
    "sharing_ratio",
    "slide",
    "stats",
    "unpin",
    "usage",
]
