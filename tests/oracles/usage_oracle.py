"""What pages are used for, slot by slot: see `pagedjax.pages.usage`."""

from pagedjax.pages import NULL_PAGE


def slow_usage(table, page_size, computed, limits):
    """(mapped, distinct, tokens, reserved, internal) of a table i32[G, R, P], with the rows' lengths and limits as lists."""
    held, may, mapped = {}, {}, 0
    for group in table.tolist():
        for row, pages in enumerate(group):
            for logical, page in enumerate(pages):
                if page == NULL_PAGE:
                    continue
                mapped += 1
                for offset in range(page_size):
                    token = logical * page_size + offset
                    slot = page, offset
                    held[slot] = held.get(slot, False) or token < computed[row]
                    may[slot] = may.get(slot, False) or token < limits[row]
    distinct = len({page for page, _ in held})
    tokens = sum(held.values())
    reserved = sum(may[slot] and not held[slot] for slot in held)
    return mapped, distinct, tokens, reserved, len(held) - tokens - reserved
