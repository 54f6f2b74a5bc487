"""Cache blocks for drafts of a request (:mod:`weft.generate.lookup`).

The first draft is written behind the request's own tokens, in its own blocks. Each other draft has its own table, with
a copy of the request's last block. If blocks hold recurrent states, which cannot forget a wrong token, the first draft
gets a copy too.
"""

from weft.generate.block_pool import BlockPool
from weft.generate.request import Branch, Request


def branch(
    pool: BlockPool, request: Request, left: int, copies: list[tuple[int, int]]
) -> int:
    """Give cache blocks to the drafts of ``request``: each becomes a branch, in whose blocks the step computes it.
    Return the number of tokens that the branches add to the step, at most ``left``.

    ``pool``: the cache blocks. ``copies``: list to which pairs of blocks (from, to) are appended that must be copied
    before the step.
    """
    begun, (drafts, request.drafts) = left, (request.drafts, ())  # each is drawn once
    for path in drafts:
        own = not request.branches and not pool.states
        again = 0 if own else request.wanted  # tokens that are computed in the copy too
        path, kept = (
            path[: max(0, left - again)],
            len(request.table) if own else request.computed // pool.size,
        )
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


def merge_branches(
    pool: BlockPool, request: Request, best: Branch | None, right: int
) -> None:
    """Take over the ``right`` guessed tokens at the beginning of the branch ``best`` into the computed text of
    ``request``. Free the blocks of all other branches. None: no guess was right.

    With recurrent states, a branch in blocks of its own is kept only if all of its tokens are right.
    """
    if (
        best
        and right
        and (best.table is request.table or not pool.states or right == len(best.path))
    ):
        if best.table is not request.table:
            request.table[:], best.table[:] = list(best.table), list(request.table)
        request.computed += right
    release(pool, request)


def release(pool: BlockPool, request: Request) -> None:
    """Free the cache blocks that belong only to branches of ``request``, not to its text."""
    for branch in request.branches:
        if branch.table is not request.table:
            pool.release(branch.table)
    request.branches = []
