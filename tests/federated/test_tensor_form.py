"""Tensors on their way: as many bytes as the formula says, whole if nothing compresses, refused if they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.errors import WeftError
from weft.federated.client_state import ClientState
from weft.federated.federation_frames import FederationForms, travel_seed
from weft.federated.plain_tensors import load_values, save_values
from weft.federated.server_invitation import (
    ServerInvitation,
    keep_invitation,
    read_server_invitation,
)
from weft.federated.tensor_form import TensorForm, flat_tensors, split_tensors

SHAPES = {"w": (17, 9), "b": (5,), "none": (0, 4)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_compression_every_bit_arrives(dtype: torch.dtype) -> None:
    form, sent = TensorForm(SHAPES, dtype), tensors(dtype)
    packed = form.packed(sent, 0)
    assert packed.nbytes == form.nbytes == 158 * dtype.itemsize
    assert not packed.left
    came = form.unpacked(memoryview(b"".join(packed.views)), 0)
    assert all(torch.equal(came[name], sent[name]) for name in SHAPES)


@pytest.mark.parametrize(
    "word", ["topk:0.1", "randk:0.1", "int8", "int4", "sign", "powersgd:2", "cocktail"]
)
def test_what_arrives_and_what_is_left_are_the_whole(word: str) -> None:
    form, sent = TensorForm(SHAPES, torch.float64, word), tensors(torch.float64)
    packed = form.packed(sent, 7)
    assert packed.nbytes == form.nbytes < TensorForm(SHAPES, torch.float64).nbytes
    came = form.unpacked(memoryview(b"".join(packed.views)), 7)
    for name in SHAPES:
        assert torch.allclose(
            came[name] + packed.left.get(name, 0), sent[name], atol=1e-12
        )


def test_all_of_topk_is_no_compression() -> None:
    form, sent = TensorForm(SHAPES, torch.float64, "topk:1.0"), tensors(torch.float64)
    packed = form.packed(sent, 7)
    came = form.unpacked(memoryview(b"".join(packed.views)), 7)
    assert all(torch.equal(came[name], sent[name]) for name in SHAPES)
    assert not any(x.abs().sum() for x in packed.left.values())


def test_wrong_bytes_are_refused() -> None:
    form = TensorForm(SHAPES, torch.float64, "topk:0.1")
    text = b"".join(form.packed(tensors(torch.float64), 7).views)
    for wrong in (text[:-1], text + b"x", b""):
        with pytest.raises(WeftError, match="bytes came where 3 tensors take"):
            form.unpacked(memoryview(wrong), 7)
    # positions beyond the end
    with pytest.raises(WeftError):
        form.unpacked(memoryview(b"\xff" * len(text)), 7)


def test_tensors_join_and_part() -> None:
    sent = tensors()
    assert all(
        torch.equal(x, sent[name])
        for name, x in split_tensors(flat_tensors(sent), SHAPES).items()
    )


def test_masks_down_are_other_ones_than_up() -> None:
    up, down = travel_seed("a", 3), travel_seed("a", 3, down=True)
    assert up != down and travel_seed("a", 4) == up + 1
    forms = FederationForms.of(SHAPES, torch.float32, "topk:0.1", "int8")
    assert forms.most >= max(
        forms.up.nbytes, forms.down.nbytes, forms.whole.nbytes, 8 * forms.elements
    )


def test_nested_values_come_back_without_pickles(tmp_path: Path) -> None:
    value = {
        "a": [1, None, (2.5, "x")],
        "t": {"w": torch.arange(3), "e": {}},
        3: {"s": {2, 1}},
        "n": float("inf"),
    }
    save_values(tmp_path / "deep" / "7.safetensors", value)
    came = load_values(tmp_path / "deep" / "7.safetensors")
    assert torch.equal(came["t"].pop("w"), value["t"].pop("w"))  # type: ignore[attr-defined]
    assert came == value
    (tmp_path / "bad").write_bytes(b"\x80\x04K\x01.")
    for path in ("bad", "missing"):
        with pytest.raises(WeftError, match="cannot read"):
            load_values(tmp_path / path)


def test_a_client_keeps_its_key_and_what_was_left(tmp_path: Path) -> None:
    first = ClientState(tmp_path)
    key = first.key()
    first.expect("t", "left", {"w": torch.ones(2)})
    first.expect("t", "control", {"w": torch.zeros(2)})
    first.settle(True)
    first.expect("u", "left", {"w": torch.full((2,), 5.0)})
    again = ClientState(tmp_path)
    again.load()
    assert again.key() == key
    assert (
        again.groups["left"]["w"].tolist() == [1, 1] and "w" in again.groups["control"]
    )
    assert again.waiting == "u" and again.awaited["left"]["w"].tolist() == [5, 5]
    again.settle(False)
    third = ClientState(tmp_path)
    third.load()
    assert third.groups["left"]["w"].tolist() == [1, 1] and not third.waiting
    assert (tmp_path / "client.json").stat().st_mode & 0o077 == 0
    (tmp_path / "client.safetensors").write_bytes(b"x")
    with pytest.raises(WeftError, match="remove it"):
        again.load()


def test_an_invitation_is_one_line_that_no_error_shows(tmp_path: Path) -> None:
    invitation = ServerInvitation("192.0.2.1", 7800, "ab" * 32)
    path = keep_invitation(tmp_path, invitation)
    assert (
        read_server_invitation(str(path))
        == read_server_invitation(f" {invitation}\n")
        == invitation
    )
    assert path.stat().st_mode & 0o077 == 0 and "ab" not in repr(invitation)
    for wrong in (
        str(invitation)[:-5],
        f"weft-peer://{'ab' * 32}@x:1",
        "weft-server://",
        str(tmp_path / "none"),
    ):
        with pytest.raises(Exception, match="invitation") as error:
            read_server_invitation(wrong)
        assert "abab" not in str(error.value)
