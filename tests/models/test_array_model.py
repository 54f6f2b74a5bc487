"""Models of arrays: what they predict, their loss, and plugins that return something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import registry
from weft.data.batch import IGNORE, Batch
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.models.array_model import ArrayModel
from weft.models.hooks import Hooks
from weft.models.plugin_loss import TokenLoss
from weft.recipe import ModelShape, build_recipe
from weft.shapes.parameters import parameter_count

pytestmark = pytest.mark.usefixtures("own_techniques")


def shape_of(kind: str = "mlp", **settings: Any) -> ModelShape:
    return ModelShape(
        kind=kind,
        settings=settings,
        inputs={"x": (2, 2), "t": ()},
        outputs={"y": (3,), "z": (2, 1)},
    )


def batch() -> Batch:
    """Three samples and a row of padding."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 2), "t": (), "y": (3,), "z": (2, 1)}
    arrays = {name: torch.randn(4, *shape, generator=rng) for name, shape in shapes.items()}  # fmt: skip
    labels = torch.tensor([[0], [0], [0], [IGNORE]])
    zeros = torch.zeros(4, 1, dtype=torch.int64)
    return Batch(zeros, labels, zeros, torch.arange(5, dtype=torch.int32), arrays=arrays)  # fmt: skip


def loss_of(model: ArrayModel, given: Batch) -> torch.Tensor:
    return model(given.tokens, given.positions, given.cu_seqlens, given)


def test_the_loss_is_the_mean_squared_error_of_each_sample() -> None:
    model, given = ArrayModel(shape_of(width=6, depth=2), Mesh.single()), batch()
    assert given.arrays is not None
    x = torch.cat([given.arrays["x"].flatten(1), given.arrays["t"][:, None]], 1)
    out = model.net.net(x)
    target = torch.cat([given.arrays["y"], given.arrays["z"].flatten(1)], 1)
    expected = (out - target)[:3].square().mean(1).sum()
    assert loss_of(model, given).item() == pytest.approx(expected.item(), 1e-6)
    predicted = model.predict(given.arrays)
    assert predicted["z"].shape == (4, 2, 1)
    torch.testing.assert_close(predicted["y"], out[:, :3])
    assert given.label_weight == 3
    moved = given.to(torch.device("cpu")).arrays
    assert moved is not None and moved.keys() == given.arrays.keys()


def test_a_loss_of_a_plugin_sees_all_values_of_a_sample() -> None:
    def largest(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (predicted - target).abs().amax(1)

    shape, given = shape_of(width=6), batch()
    plain = ArrayModel(shape, Mesh.single())
    model = ArrayModel(shape, Mesh.single(), hooks=Hooks(TokenLoss(largest, 0)))
    model.load_state_dict(plain.state_dict())
    assert given.arrays is not None
    predicted = model.predict(given.arrays)
    parts = [(predicted[n] - given.arrays[n]).abs().flatten(1) for n in ("y", "z")]
    expected = torch.cat(parts, 1).amax(1)[:3].sum()
    assert loss_of(model, given).item() == pytest.approx(expected.item(), 1e-6)

    wrong = Hooks(TokenLoss(lambda predicted, target: predicted - target, 0))
    with pytest.raises(WeftError, match=r"loss returned \[3, 5\] for 3 samples"):
        loss_of(ArrayModel(shape, Mesh.single(), hooks=wrong), given)


def test_a_surrogate_that_returns_something_else_is_named() -> None:
    class Wrong(torch.nn.Module):
        def __init__(self, inputs: Any, outputs: Any, how: str) -> None:
            super().__init__()
            self.how, self.linear = how, torch.nn.Linear(4, 5)

        def forward(self, arrays: dict[str, torch.Tensor]) -> Any:
            y = self.linear(arrays["x"].flatten(1))
            return y if self.how == "tensor" else {"y": y}

    registry.register("surrogate", "wrong")(Wrong)
    for how, why in (("tensor", "returned Tensor"), ("shape", r"returned \{'y': \[3, 5\]\} where")):  # fmt: skip
        model = ArrayModel(shape_of("wrong", how=how), Mesh.single())
        with pytest.raises(WeftError, match=why):
            loss_of(model, batch())


def test_tokens_are_not_read() -> None:
    model, given = ArrayModel(shape_of(), Mesh.single()), batch()
    with pytest.raises(UsageError, match="neither reads nor writes text"):
        model(given.tokens, given.positions, given.cu_seqlens)


def test_parameters_are_counted() -> None:
    count = parameter_count(shape_of(width=6, depth=2), 0)
    assert count == (5 * 6 + 6) + (6 * 6 + 6) + (6 * 5 + 5)


@pytest.mark.parametrize(("model", "why"), [
    ({"kind": "mlp", "inputs": {"x": [1]}}, "give both, or neither"),
    ({"kind": "mlp", "inputs": {"x": [1]}, "outputs": {"x": [1]}}, "an input and an output"),
    ({"inputs": {"x": [1]}, "outputs": {"y": [1]}}, "name it: kind = 'mlp'"),
    ({"kind": "mlp", "inputs": {"x": [0]}, "outputs": {"y": [1]}}, "greater than 0"),
    ({"kind": "mlp"}, "it reads arrays"),
    ({"kind": "mlq", "inputs": {"x": [1]}, "outputs": {"y": [1]}}, "did you mean 'mlp'"),
])  # fmt: skip
def test_mistakes_are_one_line(model: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        build_recipe({"model": model, "stream": {"producers": ["a"]}})
    assert "\n" not in str(caught.value)
