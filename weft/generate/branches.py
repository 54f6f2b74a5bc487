"""Blocks for guesses of what a request will write (:mod:`weft.generate.speculation`).

The first guess goes on in the request's own blocks. Others begin from copies of the last one, as all do where a block
sums up its tokens, so that none of these can be taken back.
"""

from weft.generate.pool import BlockPool
from weft.generate.request import Branch, Request


def branch(pool: BlockPool, request: Request, left: int, copies: list[tuple[int, int]]) -> int:
    """Make branches of a request's drafts, as far as there is room for ``left`` tokens; returns how many these are.

    ``copies`` grows by the blocks that have to be copied first.
    """
    begun, (drafts, request.drafts) = left, (request.drafts, ())  # each is drawn once
    for path in drafts:
        own = not request.branches and not pool.states
        again = 0 if own else request.wanted  # tokens that are computed in the copy too
        path, kept = path[: max(0, left - again)], len(request.table) if own else request.computed // pool.size
        new = -(-(request.computed + request.wanted + len(path)) // pool.size) - kept
        if not path or new > pool.free:
            break
        table = request.table if own else request.table[:kept]
        if not own:
            pool.hold(table)
        table.extend(pool.take() for _ in range(new))
        if not own and request.computed % pool.size:
            copies.append((request.table[kept], table[kept]))
        request.branches.append(Branch(path, table))
        left -= again + len(path)
    return begun - left


def merge(pool: BlockPool, request: Request, best: Branch | None, right: int) -> None:
    """Let the first ``right`` guesses of ``best`` count as computed, if they can be kept without the wrong ones."""
    if best and right and (best.table is request.table or not pool.states or right == len(best.path)):
        if best.table is not request.table:
            request.table[:], best.table[:] = list(best.table), list(request.table)
        request.computed += right
    release(pool, request)


def release(pool: BlockPool, request: Request) -> None:
    """Give back what branches alone own."""
    for one in request.branches:
        if one.table is not request.table:
            pool.release(one.table)
    request.branches = []
