"""Frames between a server of federated training and its clients: heads in JSON, tensors as raw bytes.

A client begins with a hello that says who it is and which model it trains. The server answers ``welcome`` or
``refused``. Afterwards the server sends ``work``, and the client an ``update`` for each of them, which the server
answers with ``taken``. ``beat`` says that an end lives, ``tell`` and ``seed`` belong to secure sums, ``end`` ends the
run. Whatever an end does not understand ends the connection, with a line.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import WeftError
from weft.federated.client_work import CohortShare, WorkAnswer, WorkOrder
from weft.federated.tensor_form import TensorForm
from weft.net.wire import Head

T = torch.Tensor

#: Seconds between two beats, and without any frame after which the other end counts as gone.
BEAT_S, SILENT_S = 2.0, 20.0
#: Most characters of a client's name.
LONGEST_NAME = 64
#: Vectors that policies send beside the model, and that clients send beside their difference.
VECTORS = ("direction", "control")


@dataclass(frozen=True)
class FederationForms:
    """Encodings of the tensors that a run's server and clients exchange.

    Attributes:
        ``up``: encoding of clients' differences.
        ``down``: encoding of the model's changes, for clients that have an earlier version.
        ``whole``: encoding of the whole model, and of vectors of policies.
    """

    up: TensorForm
    down: TensorForm
    whole: TensorForm

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        compress: str = "none",
        compress_back: str = "none",
    ) -> FederationForms:
        """Return the encodings of a run. ``shapes``, ``dtype``: those of the learning parameters.

        ``compress``: compressor of differences. ``compress_back``: compressor of changes of the model.
        """
        whole = TensorForm(shapes, dtype)
        return cls(
            TensorForm(shapes, dtype, compress),
            TensorForm(shapes, dtype, compress_back),
            whole,
        )

    @property
    def most(self) -> int:
        """Largest number of bytes of a frame: the model, or its masked integers, with all vectors of the policy."""
        return (1 + len(VECTORS)) * max(
            self.whole.nbytes, self.up.nbytes, 8 * self.elements
        )

    @property
    def elements(self) -> int:
        """Number of elements of all learning parameters of the model together."""
        return sum(math.prod(shape) for shape in self.whole.shapes.values())


def travel_seed(client: str, version: int, down: bool = False) -> int:
    """Return the seed of a compressor's random choices for messages between ``client`` and server about ``version``.

    Successive versions have successive seeds. ``down``: whether the message goes to the client; the two directions have
    different masks (CELLM).
    """
    return zlib.crc32(f"{client} {'down' if down else 'up'}".encode()) + version


def order_head(order: WorkOrder, base: str, last: bool = False) -> Head:
    """Return the head (JSON values) of a frame with a work order.

    ``base``: whether the model is sent "whole" or as a "change". ``last``: whether the frame ends the run.
    """
    secure = None
    if order.secure is not None:
        secure = {
            "cohort": order.secure.cohort,
            "members": dict(order.secure.members),
            "share": order.secure.share,
        }
    return {
        "kind": "end" if last else "work", "token": order.token, "version": order.version, "steps": order.steps,
        "beta": order.beta, "control": order.control, "groups": sorted(order.sent), "base": base, "secure": secure,
    }  # fmt: skip


def read_order(
    head: Head,
    payload: memoryview,
    forms: FederationForms,
    name: str,
    before: Mapping[str, T],
) -> WorkOrder:
    """Return the work order in a frame. ``head``, ``payload``: JSON values and bytes of the frame.

    ``forms``: encodings of tensors. ``name``: the client's name, from which the seed of the compressor follows.
    ``before``: the client's model, to which a sent change is added. Raises :class:`WeftError` for a malformed frame.
    """
    version = whole_number(head, "version")
    base = text_under(head, "base", ("whole", "change"))
    form = forms.whole if base == "whole" else forms.down
    groups = names_of(head, "groups", VECTORS)
    tensors, rest = _first(form, payload, travel_seed(name, version, down=True))
    if base == "change":
        if not before:
            raise WeftError(
                "the server sent a change of a model that this client does not have"
            )
        tensors = {key: before[key] + x for key, x in tensors.items()}
    sent = dict[str, Mapping[str, T]]()
    for group in groups:
        sent[group], rest = _first(forms.whole, rest, 0)
    if rest.nbytes:
        raise WeftError(
            f"{rest.nbytes} bytes more came than the work of the server has"
        )
    return WorkOrder(
        text_under(head, "token"), version, whole_number(head, "steps"), tensors, sent, number_under(head, "beta"),
        head.get("control") is True, _cohort(head.get("secure")),
    )  # fmt: skip


def _cohort(secure: Any) -> CohortShare | None:
    if secure is None:
        return None
    if not isinstance(secure, dict) or not isinstance(secure.get("members"), dict):
        raise WeftError("the server's cohort of a secure sum is damaged")
    members = {str(name): str(key) for name, key in secure["members"].items()}
    return CohortShare(
        text_under(secure, "cohort"), members, number_under(secure, "share")
    )


def answer_head(answer: WorkAnswer) -> Head:
    """Return the JSON head of the frame in which a client sends ``answer``, its update."""
    return {
        "kind": "update", "token": answer.order.token, "version": answer.order.version, "steps": answer.steps,
        "seconds": answer.seconds, "rates": answer.rates, "loss": answer.loss, "samples": answer.samples,
        "groups": sorted(answer.extra),
    }  # fmt: skip


@dataclass(frozen=True)
class AnswerNumbers:
    """Values in the head of a frame with a client's update: version of the model, counts, duration and loss.

    The fields have the same names and meanings as those of :class:`WorkAnswer`.
    """

    version: int
    steps: int
    seconds: float
    rates: float
    loss: float
    samples: int
    groups: Sequence[str]


def read_numbers(head: Head) -> AnswerNumbers:
    """Read and return version, number of steps, duration, learning rates, loss and number of samples of a client's
    update.

    ``head``: JSON head of the frame with the update. A missing loss is NaN. Raises :class:`WeftError` if another value
    is missing or out of range.
    """
    loss = head.get("loss")
    return AnswerNumbers(
        whole_number(head, "version"), whole_number(head, "steps"), number_under(head, "seconds"),
        number_under(head, "rates"), float(loss) if isinstance(loss, int | float) else math.nan,
        whole_number(head, "samples"), names_of(head, "groups", VECTORS),
    )  # fmt: skip


def read_tensors(
    form: TensorForm,
    payload: memoryview,
    seed: int,
    groups: Sequence[str],
    whole: TensorForm,
) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """Return the tensors of an update: the difference of the parameters, and one more dict for each name in ``groups``.

    ``payload``: bytes of the update. ``form``: encoding of the difference, with the ``seed`` of its compressor.
    ``whole``: encoding of the other dicts. Raises :class:`WeftError` if the number of bytes is wrong.
    """
    expected = form.nbytes + len(groups) * whole.nbytes
    if payload.nbytes != expected:
        raise WeftError(
            f"it has {payload.nbytes:,} bytes, and this run's updates have {expected:,}"
        )
    difference, rest = _first(form, payload, seed)
    extra = dict[str, dict[str, T]]()
    for group in groups:
        extra[group], rest = _first(whole, rest, 0)
    return difference, extra


def _first(
    form: TensorForm, payload: memoryview, seed: int
) -> tuple[dict[str, T], memoryview]:
    """Return the tensors at the beginning of ``payload``, and what follows them."""
    return form.unpacked(payload[: form.nbytes], seed), payload[form.nbytes :]


def whole_number(head: Mapping[str, Any], key: str) -> int:
    """Return the whole number, at least 0, under ``key`` in a frame's ``head``.

    Raises :class:`WeftError` for other values.
    """
    value = head.get(key)
    if type(value) is not int or not 0 <= value < 2**53:
        raise WeftError(f"{key} = {str(value)[:40]!r} is no whole number")
    return value


def number_under(head: Mapping[str, Any], key: str) -> float:
    """Return the finite number, at least 0, under ``key`` in a frame's ``head``.

    Raises :class:`WeftError` for other values.
    """
    value: Any = head.get(key)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise WeftError(f"{key} = {str(value)[:40]!r} is no number from 0")
    return float(value)


def text_under(head: Mapping[str, Any], key: str, choices: Sequence[str] = ()) -> str:
    """Return the text under ``key`` in a frame's ``head``.

    ``choices``: allowed texts; empty: any. Raises :class:`WeftError` for other values.
    """
    value = head.get(key)
    if not isinstance(value, str) or (choices and value not in choices):
        raise WeftError(f"{key} = {str(value)[:40]!r} is not what it can be")
    return value


def names_of(head: Mapping[str, Any], key: str, choices: Sequence[str]) -> list[str]:
    """Return the list of different names under ``key`` in a frame's ``head``.

    ``choices``: allowed names. Raises :class:`WeftError` for other values.
    """
    value = head.get(key)
    if (
        not isinstance(value, list)
        or len({*map(str, value)}) != len(value)
        or any(name not in choices for name in value)
    ):
        raise WeftError(f"{key} = {str(value)[:40]!r} are not names that it can have")
    return value
