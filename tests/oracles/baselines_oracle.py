"""A buddy allocator and a pool of chunks in plain Python: sets of (start, size), searched from the beginning."""


class BuddyOracle:
    """Chunks are (start, size) in units; nothing is an array."""

    def __init__(self, num_units, max_order):
        self.free, self.rows, self.largest = set(), {}, 2**max_order
        at, size = 0, self.largest
        while at < num_units:
            while size > num_units - at:
                size //= 2
            self.free.add((at, size))
            at += size

    def reserve_one(self, row, units):
        size = 1
        while size < units:
            size *= 2
        fitting = sorted((s, at) for at, s in self.free if s >= size)
        if units < 1 or row in self.rows or not fitting:
            return False
        have, at = fitting[0]
        self.free.remove((at, have))
        while have > size:
            have //= 2
            self.free.add((at + have, have))
        self.rows[row] = (at, size)
        return True

    def reserve(self, groups):
        """Groups of (row, units), each whole or not at all, until one does not fit."""
        out = []
        for group in groups:
            free, rows = set(self.free), dict(self.rows)
            if (out and not out[-1]) or not all(self.reserve_one(row, units) for row, units in group):
                self.free, self.rows = free, rows
                out.append(False)
            else:
                out.append(True)
        return out

    def release(self, row):
        if row not in self.rows:
            return 0
        at, size = self.rows.pop(row)
        given = size
        while size < self.largest:
            other = at + size if at % (2 * size) == 0 else at - size
            if (other, size) not in self.free:
                break
            self.free.remove((other, size))
            at, size = min(at, other), 2 * size
        self.free.add((at, size))
        return given


class ChunksOracle:
    """Lists of chunk ids."""

    def __init__(self, num_chunks, max_rows, max_chunks_per_row):
        self.stack = list(range(num_chunks))[::-1]
        self.rows, self.P = [[] for _ in range(max_rows)], max_chunks_per_row

    def alloc(self, rows, need):
        out = []
        for row, n in zip(rows, need, strict=True):
            ok = all(out) and 0 <= n <= len(self.stack) and len(self.rows[row]) + n <= self.P
            if ok:
                self.rows[row] += [self.stack.pop() for _ in range(n)]
            out.append(ok)
        return out

    def release(self, rows):
        given = [chunk for row in rows for chunk in self.rows[row]]
        self.stack += given
        for row in rows:
            self.rows[row] = []
        return len(given)
