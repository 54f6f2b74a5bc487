"""Samples the next tokens of many texts from the rows of logits that one forward pass has computed for them.

A row is processed in the order of transformers' processors: bias, penalties (on the written tokens; ``repetition`` on
the prompt too, Keskar et al. 2019), the grammar's mask, and temperature. Then tokens are kept that are among the
likeliest ``top_k``, that make up ``top_p`` (nucleus sampling, Holtzman et al. 2019), and that are not below ``min_p``
of the likeliest (Nguyen et al. 2024). One random number per text selects one of them.

Rows with the same kind of settings are processed together where the logits are, and only ids come back. Nothing is
ever summed over rows or compared between them, so a row gives the same token, bit by bit, whatever other rows there
are.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.generate.nucleus import cut_to_nucleus
from weft.generate.row_kernel import (
    LOG2_E,
    RowPenalties,
    draw_row_tokens,
    kernel_serves,
    row_weights,
)
from weft.generate.sampling import Sampling
from weft.generate.token_counts import TokenCounts
from weft.models.numbers import wide
from weft.models.queued_copy import queued_copy

T = torch.Tensor

#: Values of a row whose sum or maximum is computed first, so that a search looks at few of them.
BLOCK_VALUES = 64

#: Stands for the token of a row that has none, as its logits are not numbers.
NO_TOKEN = -1

#: Rows that are processed together on a CPU: their values stay in its caches.
ROWS_IN_CACHE = 8

#: How many of the likeliest tokens are looked at for ``top_p``, as long as they do not suffice.
LIKELIEST = (64, 1024, 8192)


class TextState(NamedTuple):
    """Settings and counts on which the next token of a text depends beside a row of logits.

    Attributes:
        ``how``: settings of sampling.
        ``number``: random number from [0, 1) that selects the token.
        ``counts``: counts of the text's tokens for penalties; None: no penalties.
        ``allowed``: ids that a grammar allows, bool ``[vocab]``; None: all.
        ``forbidden``: ids that are not allowed, unless no other id is.
    """

    how: Sampling
    number: float
    counts: TokenCounts | None = None
    allowed: T | None = None
    forbidden: Collection[int] = ()

    @property
    def only_penalised(self) -> bool:
        """Whether nothing but penalties changes the logits before a token is sampled, or nothing at all."""
        masked = self.allowed is not None or bool(self.forbidden)
        return not masked and not self.how.bias

    @property
    def changes(self) -> bool:
        """Whether a bias, penalties or a mask of allowed ids change the logits before a token is sampled."""
        return not self.only_penalised or self.counts is not None


class Candidates(NamedTuple):
    """The tokens that can be sampled for some rows.

    ``rows``: numbers of the rows. ``weights``: ``[rows, candidates]``, proportional to the probabilities. ``ids``: the
    token ids of the candidates, of the same shape; None: candidate ``i`` is token ``i``.
    """

    rows: T
    weights: T
    ids: T | None


class RowGroup(NamedTuple):
    """Rows of logits that are processed together, because their texts have the same kind of settings.

    Attributes:
        ``rows``: numbers of the rows.
        ``values``: logits with the bias, the penalties and the masks of the texts, ``[rows, vocab]``.
        ``penalties``: those that ``values`` does not contain yet, for the kernel; None: there are none.
        ``hows``: settings of sampling of each row.
        ``top_k``: number of likeliest tokens from which tokens are sampled; 0: all.
        ``by_kernel``: whether :mod:`weft.generate.row_kernel` samples the tokens.
    """

    rows: T
    values: T
    hows: Sequence[Sampling]
    top_k: int
    by_kernel: bool
    penalties: RowPenalties | None = None


def choose_tokens(logits: T, texts: Sequence[TextState]) -> list[int]:
    """Sample the next token of each of ``texts`` from its row of ``logits`` ``[texts, vocab]``; return the token ids.

    With temperature 0 it is the likeliest token. It is :data:`NO_TOKEN` for a row whose logits have NaN or infinity, or
    are all -inf.
    """
    kinds: dict[bool, list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        kinds[text.how.temperature == 0].append(row)
    if not kinds[False]:
        return likeliest_tokens(logits, texts).tolist()
    chosen = torch.empty(len(texts), dtype=torch.int64, device=logits.device)
    for greedy, rows in kinds.items():
        states, at = [texts[row] for row in rows], index_of(rows, logits.device)
        own = logit_rows(logits, rows)
        chosen[at] = (likeliest_tokens if greedy else drawn_tokens)(own, states)
    return chosen.tolist()


def drawn_tokens(logits: T, texts: Sequence[TextState]) -> T:
    """Draw the next token of each of ``texts`` from its row of ``logits`` ``[texts, vocab]``; return the token ids,
    int64 ``[texts]``. No text has temperature 0.
    """
    numbers = torch.tensor(
        [text.number for text in texts], dtype=torch.float64, device=logits.device
    )
    chosen = torch.empty(len(texts), dtype=torch.int64, device=logits.device)
    for group in row_groups(logits, texts):
        at = group.rows
        if group.by_kernel:
            chosen[at] = draw_row_tokens(
                group.values, group.hows, numbers[at], group.penalties
            )
            continue
        for kept in group_candidates(group):
            places = draw_rows(kept.weights, numbers[kept.rows])
            if kept.ids is not None:
                ids = kept.ids.gather(1, places.clamp(min=0)[:, None])[:, 0]
                places = torch.where(places < 0, NO_TOKEN, ids)
            chosen[kept.rows] = places
    return chosen


def likeliest_tokens(logits: T, texts: Sequence[TextState]) -> T:
    """Return the likeliest token of each row of ``logits`` ``[texts, vocab]``."""
    changed = [row for row, text in enumerate(texts) if text.changes]
    if len(changed) < len(texts):
        best = largest_index(logits)
    else:
        best = torch.empty(len(texts), dtype=torch.int64, device=logits.device)
    for rows in portions(changed, logits.device):
        at = index_of(rows, logits.device)
        states = [texts[row] for row in rows]
        best[at] = largest_index(shaped_logits(logit_rows(logits, rows), states))
    return best


def largest_index(values: T) -> T:
    """Return the index of the first largest value of each row of ``values`` ``[rows, n]``; :data:`NO_TOKEN` if this
    value is not finite. NaN counts as the largest value.

    On the CPU NumPy finds it in a tenth of the time of PyTorch.
    """
    if values.device.type != "cpu" or values.dtype == torch.bfloat16:
        best = values.argmax(-1)
    else:
        best = torch.from_numpy(values.numpy().argmax(-1))
    largest = values.gather(1, best[:, None])[:, 0]
    return torch.where(largest.isfinite(), best, NO_TOKEN)


def portions(rows: Sequence[int], device: torch.device) -> Iterator[Sequence[int]]:
    """Yield ``rows`` in successive parts, each of which is processed at once on ``device``. The parts are small on a
    CPU, so that they fit in its cache.
    """
    most = ROWS_IN_CACHE if device.type == "cpu" else max(1, len(rows))
    for first in range(0, len(rows), most):
        yield rows[first : first + most]


def index_of(rows: Sequence[int], device: torch.device) -> T:
    """Return the row numbers ``rows`` as an int64 tensor ``[rows]`` on ``device``, to index logits with. The copy to a
    GPU is only queued.
    """
    return queued_copy(rows, device)


def logit_rows(logits: T, rows: Sequence[int]) -> T:
    """Return ``rows`` of ``logits`` ``[texts, vocab]`` as ``[rows, vocab]``; a view if their indices are consecutive,
    else a copy.
    """
    first, count = rows[0], len(rows)
    if [*rows] == [*range(first, first + count)]:
        return logits[first : first + count]
    return logits[index_of(rows, logits.device)]


def shaped_logits(logits: T, texts: Sequence[TextState]) -> T:
    """Return ``logits`` ``[texts, vocab]`` with the bias, the penalties and the masks of ``texts``.

    Ids that are not allowed get -inf. The result is ``logits`` itself if no text changes anything.
    """
    changed = [row for row, text in enumerate(texts) if text.changes]
    if not changed:
        return logits
    out = logits.to(wide(logits.dtype), copy=True)
    for row in changed:
        if bias := texts[row].how.bias:
            ids = index_of(list(bias), out.device)
            out[row][ids] += out.new_tensor(list(bias.values()))
    penalise(out, texts)
    masks: dict[int, T] = {}
    for row in changed:
        _, _, _, allowed, forbidden = texts[row]
        values = out[row]
        if allowed is not None:
            masks[row] = without(allowed, forbidden)
        elif forbidden:
            ends = [i for i in {*forbidden} if 0 <= i < len(values)]
            if len(ends) < len(values):
                values[index_of(ends, out.device)] = -torch.inf
    if masks:
        hidden = torch.stack([*masks.values()]).logical_not_().to(out.device)
        if len(masks) == len(out):
            return out.masked_fill_(hidden, -torch.inf)
        at = index_of([*masks], out.device)
        out[at] = out[at].masked_fill_(hidden, -torch.inf)
    return out


def without(allowed: T, forbidden: Collection[int]) -> T:
    """Return the mask ``allowed``, bool ``[vocab]``, without the ids ``forbidden``. If no other id is allowed, return
    the mask unchanged.
    """
    rest = allowed.clone()
    rest[[i for i in forbidden if 0 <= i < len(rest)]] = False
    return rest if rest.any() else allowed


def penalise(values: T, texts: Sequence[TextState]) -> None:
    """Change the logits ``values`` ``[texts, vocab]`` in place by the penalties of those ``texts`` that have any."""
    ids, times, settings = list[T](), list[T](), list[T]()
    for row, text in enumerate(texts):
        if text.counts is not None:
            how = text.how
            own, counts = text.counts.tensors()
            ids.append(own + row * values.shape[1])
            times.append(counts)
            penalties = values.new_tensor(
                [[how.repetition], [how.presence], [how.frequency]], device="cpu"
            )
            settings.append(penalties.expand(-1, len(own)))
    if not ids:
        return
    places = torch.cat(ids).to(values.device)
    often = torch.cat(times).to(values.device, values.dtype)
    repetition, presence, frequency = torch.cat(settings, 1).to(values.device)
    flat = values.view(-1)
    seen = flat[places]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    flat[places] = seen - (presence * (often > 0) + frequency * often)


def row_penalties(texts: Sequence[TextState]) -> RowPenalties | None:
    """Return the penalties of ``texts`` for the kernel; None if no text has any."""
    if all(text.counts is None for text in texts):
        return None
    counted = [text.counts or TokenCounts() for text in texts]
    ids, often = zip(*(counts.tensors() for counts in counted), strict=True)
    hows = [text.how for text in texts]
    settings = torch.tensor(
        [[how.repetition, how.presence, how.frequency] for how in hows],
        dtype=torch.float32,
    )
    lengths = [len(each) for each in ids]
    return RowPenalties(torch.cat(ids), torch.cat(often).float(), settings, lengths)


def sampling_candidates(logits: T, texts: Sequence[TextState]) -> Iterator[Candidates]:
    """Yield groups of rows of ``logits`` ``[texts, vocab]``, each with the tokens that can be sampled for these rows.
    Every row is in one group.
    """
    for group in row_groups(logits, texts):
        yield from group_candidates(group)


def row_groups(logits: T, texts: Sequence[TextState]) -> Iterator[RowGroup]:
    """Yield the rows of ``logits`` ``[texts, vocab]`` in groups. Every row is in one group."""
    vocab = logits.shape[1]
    kinds: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        top_k = text.how.top_k if text.how.top_k < vocab else 0
        kinds[top_k, text.only_penalised].append(row)
    for (top_k, _), of_kind in kinds.items():
        for rows in portions(of_kind, logits.device):
            yield row_group(logits, rows, [texts[row] for row in rows], top_k)


def row_group(
    logits: T, rows: Sequence[int], texts: Sequence[TextState], top_k: int
) -> RowGroup:
    """Return ``rows`` of ``logits`` as a group. ``texts``: the text of each of these rows. ``top_k``: number of
    likeliest tokens from which tokens are sampled; 0: all.
    """
    at, hows = index_of(rows, logits.device), [text.how for text in texts]
    values = logit_rows(logits, rows)
    values = values.to(wide(values.dtype))
    by_kernel = not top_k and kernel_serves(values)
    if by_kernel and texts[0].only_penalised:
        return RowGroup(at, values, hows, top_k, True, row_penalties(texts))
    return RowGroup(at, shaped_logits(values, texts), hows, top_k, by_kernel)


def group_candidates(group: RowGroup) -> Iterator[Candidates]:
    """Yield the tokens that can be sampled for the rows of ``group``, in one or several parts."""
    at, values, hows, top_k, by_kernel, penalties = group
    if top_k:
        yield Candidates(at, *likeliest(values, hows, top_k))
    elif by_kernel:
        yield Candidates(at, row_weights(values, hows, penalties), None)
    else:
        for nucleus in (False, True):
            rows = [row for row, how in enumerate(hows) if (how.top_p < 1) == nucleus]
            if not rows:
                continue
            own, kind = logit_rows(values, rows), [hows[row] for row in rows]
            if nucleus:
                for kept in nuclei(own, kind):
                    yield kept._replace(rows=at[rows][kept.rows])
            else:
                weights = exponentials(own, own.amax(-1, True), kind)
                yield Candidates(at[rows], above_least(weights, kind), None)


def exponentials(values: T, best: T, hows: Sequence[Sampling]) -> T:
    """Return ``exp((values - best) / temperature)`` for each row, at most 1.

    ``values``: logits, ``[rows, n]``. ``best``: the largest value of each row, ``[rows, 1]``. ``hows``: settings of
    sampling of each row.
    """
    # Largest logit 0 first: dividing by a tiny temperature then gives -inf at worst, never inf - inf.
    # A power of two takes a third of the time of exp on a CPU.
    heat = values.new_tensor([[max(how.temperature, 1e-37)] for how in hows])
    return (values - best).mul_(LOG2_E / heat).exp2_()


def above_least(weights: T, hows: Sequence[Sampling]) -> T:
    """Return ``weights`` with 0 for tokens whose weight is below the row's ``min_p``. ``weights``: ``[rows, n]``; the
    largest weight of each row must be 1. They are changed in place. ``hows``: settings of sampling of each row.
    """
    if not any(how.min_p for how in hows):
        return weights
    least = torch.tensor([how.min_p for how in hows], dtype=weights.dtype)
    # the largest number below, as F.threshold_ keeps what is above it
    below = least.nextafter(least.new_tensor(-1.0)).tolist()
    for row, how in enumerate(hows):
        if how.min_p:
            F.threshold(weights[row], below[row], 0, inplace=True)
    return weights


def likeliest(values: T, hows: Sequence[Sampling], top_k: int) -> tuple[T, T]:
    """Return weights and ids, ``[rows, top_k]`` each, of the ``top_k`` likeliest tokens of each row of ``values``
    ``[rows, vocab]``. Tokens that ``top_p`` or ``min_p`` of ``hows`` leave out have weight 0.
    """
    best, ids = top_values(values, top_k)
    weights = exponentials(best, best[:, :1], hows)
    ends = weights.double().cumsum(-1)
    return above_least(in_nucleus(weights, ends, ends[:, -1:], hows), hows), ids


def nuclei(values: T, hows: Sequence[Sampling]) -> Iterator[Candidates]:
    """Yield, for groups of the rows of ``values`` ``[rows, vocab]``, the smallest sets of likeliest tokens whose
    probability is ``top_p`` together.

    Rows that need few tokens come first, as only their likeliest tokens must be sorted. ``hows``: settings of sampling
    of each row.
    """
    vocab, left = values.shape[1], torch.arange(len(values), device=values.device)
    totals = exponentials(values, values.amax(-1, True), hows)
    total = block_sums(totals).double().cumsum(-1)[:, -1:]
    lost = ~(total[:, 0] > 0)  # their logits are not numbers
    if lost.any():
        yield Candidates(left[lost], totals[lost], None)
        own = [how for how, gone in zip(hows, lost.tolist(), strict=True) if not gone]
        rest = left[~lost]
        for part in nuclei(values[rest], own) if own else ():
            yield part._replace(rows=rest[part.rows])
        return
    if values.device.type == "cpu":
        sums = total[:, 0].tolist()
        cut = [
            cut_to_nucleus(row, how.top_p * each, each)
            for row, how, each in zip(totals, hows, sums, strict=True)
        ]
        rows = [row for row, kept in enumerate(cut) if kept is not None]
        if rows:
            own = [hows[row] for row in rows]
            few = torch.stack([kept for kept in cut if kept is not None])
            yield Candidates(left[rows], above_least(few, own), None)
        left = left[[row for row, kept in enumerate(cut) if kept is None]]
        if not len(left):
            return
    for count in (*(n for n in LIKELIEST if n < vocab), vocab):
        own = [hows[row] for row in left.tolist()]
        best, ids = top_values(values[left], count)
        weights = exponentials(best, best[:, :1], own)
        ends = weights.double().cumsum(-1)
        share = ends.new_tensor([how.top_p for how in own])
        enough = (ends[:, -1] >= share * total[left, 0]) | (count == vocab)
        kept = above_least(in_nucleus(weights, ends, total[left], own), own)
        if enough.any():
            # in the order of the ids, in which the other ways to a nucleus draw; ids that fill up come twice, as 0
            some = kept[enough]
            whole = some.new_zeros(len(some), vocab)
            whole.scatter_add_(1, ids[enough], some)
            yield Candidates(left[enough], whole, None)
        left = left[~enough]
        if not len(left):
            return


def in_nucleus(weights: T, ends: T, total: T, hows: Sequence[Sampling]) -> T:
    """Return ``weights`` with 0 for tokens outside the nucleus. A token is outside if the weights before it in its row
    sum to ``top_p`` of ``total`` or more. The first token of a row always stays. ``weights``: ``[rows, tokens]`` in
    descending order. ``ends``: their cumulative sums. ``total`` ``[rows, 1]``: sum over all tokens. ``hows``: settings
    of sampling of each row.
    """
    if all(how.top_p == 1 for how in hows):
        return weights
    share = ends.new_tensor([[how.top_p] for how in hows])
    behind = (ends - weights >= share * total) & (share < 1)
    behind[:, 0] = False
    return weights.masked_fill(behind, 0)


def block_sums(values: T) -> T:
    """Return the sums of the blocks of each row, ``[rows, blocks]``. A block is :data:`BLOCK_VALUES` consecutive
    values; the last one may have fewer.
    """
    return value_blocks(values, 0).sum(-1)


def value_blocks(values: T, fill: float) -> T:
    """Return ``values`` ``[rows, n]`` with each row divided into blocks of :data:`BLOCK_VALUES` values: ``[rows,
    blocks, BLOCK_VALUES]``. The last block is padded with ``fill``.
    """
    rest = -values.shape[1] % BLOCK_VALUES
    padded = F.pad(values, (0, rest), value=fill) if rest else values
    return padded.unflatten(1, (-1, BLOCK_VALUES))


def top_values(values: T, count: int) -> tuple[T, T]:
    """Return the ``count`` largest values of each row ``[rows, n]``, the largest first, and their indices.

    To save work, only the ``count`` blocks of consecutive values with the largest maxima are sorted, as the result lies
    in these.
    """
    count = min(count, values.shape[1])
    if values.shape[1] < 4 * count * BLOCK_VALUES:
        return values.topk(count)
    blocks = value_blocks(values, -torch.inf)
    at = blocks.amax(-1).topk(count).indices  # [rows, count]
    places = at[:, :, None] * BLOCK_VALUES
    places = (places + torch.arange(BLOCK_VALUES, device=at.device)).flatten(1)
    few = blocks.gather(1, at[:, :, None].expand(-1, -1, BLOCK_VALUES)).flatten(1)
    best, of_few = few.topk(count)
    # where all else is -inf, what fills up the last block may be among them
    return best, places.gather(1, of_few).clamp_(max=values.shape[1] - 1)


def draw_rows(weights: T, numbers: T) -> T:
    """Draw an index by each row of ``weights`` ``[rows, n]``: return the first one at which the row's cumulative sum
    exceeds a fraction of its total. An index with weight 0 is never returned. The result is :data:`NO_TOKEN` for a row
    whose total is not a number above 0.

    ``numbers``: these fractions, random numbers in [0, 1), ``[rows]``.
    """
    if weights.shape[1] <= 4 * BLOCK_VALUES:
        ends = weights.double().cumsum(-1)
        places = first_above(ends, numbers * ends[:, -1])
        return torch.where(ends[:, -1] > 0, places, NO_TOKEN)
    blocks = value_blocks(weights, 0)
    ends = blocks.sum(-1).double().cumsum(-1)
    wanted = numbers * ends[:, -1]
    block = first_above(ends, wanted).clamp(max=ends.shape[1] - 1)[:, None]
    before = F.pad(ends, (1, 0)).gather(1, block)[:, 0]
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_VALUES))[:, 0]
    place = first_above(inside.double().cumsum(-1), wanted - before)
    return torch.where(ends[:, -1] > 0, block[:, 0] * BLOCK_VALUES + place, NO_TOKEN)


def first_above(ends: T, wanted: T) -> T:
    """Return for each row the first index at which ``ends`` ``[rows, n]``, numbers that rise along the row, exceeds
    ``wanted`` ``[rows]``. If no number does, the result is the first index of the row's largest number.
    """
    above = torch.searchsorted(ends, wanted[:, None], right=True)
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(above, last)[:, 0]


def row_log_probabilities(
    logits: T, chosen: Sequence[int], tops: Sequence[int], heats: Sequence[float] = ()
) -> list[tuple[float, dict[int, float]]]:
    """Return for each row of ``logits`` ``[rows, vocab]`` the log-probability of one token, and those of the row's
    likeliest tokens by id. Bias and penalties do not count.

    ``chosen``: the one token of each row. ``tops``: number of likeliest tokens of each row. ``heats``: number by which
    the logits of each row are divided; empty: 1.
    """
    said: dict[int, tuple[float, dict[int, float]]] = {}
    kinds: dict[int, list[int]] = defaultdict(list)
    for row, top in enumerate(tops):
        kinds[min(top, logits.shape[1])].append(row)
    for top, of_kind in kinds.items():
        for rows in portions(of_kind, logits.device):
            values = logit_rows(logits, rows).to(wide(logits.dtype))
            divisors = [heats[row] for row in rows] if heats else []
            if any(each != 1 for each in divisors):
                values = values / values.new_tensor(divisors)[:, None]
            values = values.log_softmax(-1)
            tokens = index_of([chosen[row] for row in rows], logits.device)
            own = values.gather(1, tokens[:, None])[:, 0].tolist()
            best, ids = (each.tolist() for each in top_values(values, top))
            for row, p, ps, each in zip(rows, own, best, ids, strict=True):
                said[row] = p, dict(zip(each, ps, strict=True))
    return [said[row] for row in range(len(tops))]
