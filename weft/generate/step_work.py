"""What a step computes, as six numbers on which its time depends."""

from weft.generate.scheduler import ScheduledStep


def work_of(step: ScheduledStep) -> list[float]:
    """Return a list of six numbers on which the time of ``step`` depends linearly: 1, tokens, requests, rows of logits,
    keys that are read, and products of queries and keys.
    """
    ends = [
        (tokens, request.computed + tokens) for request, tokens in step.work.items()
    ]
    rows = sum(tokens == request.wanted for request, tokens in step.work.items())
    tokens = sum(n for n, _ in ends)
    return [
        1.0,
        tokens,
        len(ends),
        rows,
        sum(end for _, end in ends),
        sum(n * (end - n / 2) for n, end in ends),
    ]
