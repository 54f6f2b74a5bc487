"""Models that Weft can plan for but not train: their sizes, from a ``config.json`` or a paper."""

from typing import Any

from weft.recipe import ModelShape


class UntrainableShape(ModelShape):
    """The sizes of a model that Weft can plan for but not train; they are not checked and may be fractions.

    ``why``: the feature that Weft lacks. ``gated``: whether feed-forwards have a gate (three matrices instead of two).
    ``clamped``: whether experts have biases and a clamped gate (GPT-OSS). ``windowed``: for each layer, whether its
    attention sees only ``window`` tokens. If empty, the fields that the class inherits from :class:`ModelShape` say
    which layers do.
    """

    why: str = ""
    gated: bool = True
    clamped: bool = False
    windowed: tuple[bool, ...] = ()

    def window_of(self, layer: int) -> int:
        if not self.windowed:
            return super().window_of(layer)
        return self.window * self.windowed[layer % len(self.windowed)]


def has_gate(model: ModelShape) -> bool:
    """Return whether hidden units of feed-forwards are multiplied with a gate, as in all models that Weft trains."""
    return not isinstance(model, UntrainableShape) or model.gated


def untrainable(why: str = "", **sizes: Any) -> UntrainableShape:
    """Return the shape of a model that Weft can plan for but not train.

    ``sizes``: fields of :class:`UntrainableShape`. ``why``: what the model needs and Weft lacks, for the error message;
    not used for models with experts or without a gate, whose reason is known here.
    """
    gated = sizes.get("gated", True)
    if sizes.get("experts"):
        why = "its sizes do not say how it routes tokens; give the model's config.json to train it"
    elif not gated:
        why = "weft train computes SwiGLU only, and this model has no gate"
    heads = sizes["heads"]
    usual = {"kv_heads": heads, "head_dim": sizes["embed"] // heads}
    return UntrainableShape.model_construct(why=why, **usual | sizes)
