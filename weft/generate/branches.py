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
    """Give cache blocks to the drafts of ``request``, so that the next step can compute them. Return the number of
    tokens that this adds to the step, at most ``left``.

    A draft is a guess of the tokens that follow the request's text. A draft that has got blocks is called a branch.
    A draft is shortened if it has more than ``left`` tokens, and dropped if the free blocks do not suffice. ``pool``:
    the cache blocks. ``copies``: list to which this function appends pairs of block numbers (from, to); these blocks
    must be copied before the step.
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
    """Add the right tokens of the branch ``best`` to the computed text of ``request``, and free the blocks of all other
    branches. A branch is a guess of the tokens that follow the text.

    ``right``: how many tokens at the beginning of ``best`` are right. ``best``: the best branch; None: no guess was
    right. A model with recurrent states cannot go back by some tokens. There, a branch with blocks of its own is taken
    over only if all its tokens are right.
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
    """Free the cache blocks of ``pool`` that belong only to branches (guessed tokens) of ``request``, not to
    its text.
    """
    for branch in request.branches:
        if branch.table is not request.table:
            pool.release(branch.table)
    request.branches = []
