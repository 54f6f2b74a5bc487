"""DualPipe and DualPipeV (DeepSeek-V3, 2412.19437, and its `DualPipe` repository): two flows meet on every rank.

A rank sees two flows: flow 0 enters at the near end of its half, flow 1 comes from the other half (or up the V). With
F = I the bubble is ``(half - 1)(F&B + B - 3W)``, B being I + W, if a pair F&B is one action. Run one after the other,
the forward's result leaves early and less of that bubble is left: half of it if F = I = W.
"""

from collections import Counter

from weft.schedule.actions import Entry


def two_flows(half: int, near: int, count: int) -> list[Entry]:
    """Return the order of actions of one rank in DualPipe, in which microbatches enter the pipeline at both ends.

    Each entry is ``(kind, flow, number)``. Flow 0 has the microbatches that enter at the rank's own end of the
    pipeline, and flow 1 has those that enter at the other end. ``number`` counts the microbatches of a flow from 0. A
    backward is one action B, or two: I (input gradient) and W (weight gradient).

    ``half``: number of ranks from one end of the pipeline to its middle; ``near``: distance of this rank from its end,
    0 for the rank at the end; ``count``: microbatches in each flow, at least ``2 * half``.
    """
    far = half - 1 - near
    steps = [("F", 0)] * (2 * far)  # fill: flow 0 reaches the turn
    steps += [("F", 0), ("F", 1)] * (near + 1)
    # gradients come back: pass them on at once
    steps += [("I", 1), ("W", 1), ("F", 1)] * far
    # F of one flow, B of the other
    steps += [("F", 0), ("B", 1), ("F", 1), ("B", 0)] * (count - 2 * half + near + 1)
    steps += [("B", 1), ("F", 1), ("B", 0)] * far
    # drain: from half way on weight gradients are kept back
    for i in range(2 * (near + 1)):
        steps.append(("B" if i <= near else "I", (i + 1) % 2))
    steps += [("W", -1), ("I", 0)] * far
    return number_microbatches(steps)


def number_microbatches(steps: list[tuple[str, int]]) -> list[Entry]:
    """Add the number of the microbatch to each step of one rank in DualPipe.

    ``steps``: pairs of a kind of action and a flow. A flow is the microbatches that enter the pipeline at the same end.
    The result has ``(kind, flow, number)`` for each pair, where each flow numbers its microbatches from 0. ``("W",
    -1)`` stands for the oldest weight gradient that is still postponed, of either flow. Weight gradients that are still
    postponed after the last step are added at the end.
    """
    done: Counter[tuple[str, int]] = Counter()
    kept: list[tuple[int, int]] = []
    order: list[Entry] = []
    for kind, flow in steps:
        if flow < 0:
            order.append(("W", *kept.pop(0)))
            continue
        sort = "F" if kind == "F" else "B"
        m = done[sort, flow]
        if kind == "W":
            m -= 1
            kept.remove((flow, m))
        else:
            done[sort, flow] += 1
        if kind == "I":
            kept.append((flow, m))
        order.append((kind, flow, m))
    return order + [("W", *k) for k in kept]
