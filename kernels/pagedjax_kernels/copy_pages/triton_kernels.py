"""The Triton kernel of copy_pages. Imports triton: only `triton.py` (lazily) and tests import this."""

# mypy: ignore-errors
# (The bodies are Triton, not Python: their names are bound by its compiler.)

import triton
import triton.language as tl


@triton.jit
def copy_kernel(pages, src, dst, out, PAGES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of one page of one layer. Grid (C, L, cdiv(WORDS, BLOCK)).

    Args:
      pages: [L, PAGES, ..], of any type; one page of a layer is WORDS words of 4 bytes. src, dst: i32[C].
      out: the memory of `pages`. Pages that are copied from are not written, so the order of programs does not matter.
    """
    copy, layer, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    target = tl.load(dst + copy)
    if target >= PAGES:
        return
    source = tl.load(src + copy)
    first = layer.to(tl.int64) * PAGES  # int64: a pool may have more than 2**31 words
    word = part * BLOCK + tl.arange(0, BLOCK)
    from_words = pages.to(tl.pointer_type(tl.int32), bitcast=True) + (first + source) * WORDS
    to_words = out.to(tl.pointer_type(tl.int32), bitcast=True) + (first + target) * WORDS
    inside = word < WORDS
    tl.store(to_words + word, tl.load(from_words + word, mask=inside), mask=inside)
