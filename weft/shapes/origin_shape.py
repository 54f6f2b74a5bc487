"""The shape of a model that starts from a pretrained one: what a recipe may say of it besides its name."""

from weft.errors import UsageError
from weft.recipe import ModelShape

#: Settings of a model that are about how it learns: a recipe's count for a model that it starts from, too.
LEARNING = ("balance", "balance_loss", "z_loss", "bias_rate", "dropout")
#: Fields by which a standard model can be made another architecture with the same weights.
CONVERTING = ("residual", "ladder_from")


def begun_shape(given: ModelShape, shape: ModelShape) -> ModelShape:
    """Return the shape of the model that a run begins with.

    ``given``: the recipe's section [model], in which ``from`` names a pretrained model of ``shape``. The section may
    only enlarge the vocabulary, say how the model learns, and convert it: to activation ``relu``, and as
    :func:`converted_shape` says. Raises
    :class:`UsageError` for fields that contradict the pretrained model.
    """
    named = (
        given.model_fields_set
        - {"origin", *LEARNING}
        - ({"vocab"} if not given.vocab else set())
    )
    if given.vocab > shape.vocab and shape.output == "tokens":
        shape = shape.model_copy(update={"vocab": given.vocab})
    if shape.residual == "standard":
        shape = converted_shape(shape, given)
    # few of whose neurons are active: trained on, it learns again what it has lost (Mirzadeh et al. 2023, 2310.04564)
    if "activation" in given.model_fields_set and given.activation == "relu":
        shape = shape.model_copy(update={"activation": "relu"})
    if ignored := [
        name for name in sorted(named) if getattr(given, name) != getattr(shape, name)
    ]:
        first = ignored[0]
        raise UsageError(
            f"model.{first} = {getattr(given, first)!r}, but model.from = {given.origin!r} is of a model with "
            f"{getattr(shape, first)!r}, and that counts; leave out {', '.join(f'model.{name}' for name in ignored)}"
        )
    learning = {
        name: getattr(given, name)
        for name in LEARNING
        if name in given.model_fields_set
    }
    # dropout is of the run, and never of the pretrained model
    own = {"origin": given.origin, "dropout": 0.0}
    return shape.model_copy(update=own | learning)


def converted_shape(shape: ModelShape, given: ModelShape) -> ModelShape:
    """Return the pretrained model's ``shape`` with the fields of :data:`CONVERTING` that the section ``given`` sets.

    Raises :class:`UsageError` if ``ladder_from`` is no layer of the pretrained model.
    """
    if given.ladder_from >= shape.layers:
        raise UsageError(
            f"model.ladder_from = {given.ladder_from}, but model.from = {given.origin!r} has {shape.layers} layers; "
            "lower it"
        )
    return shape.model_copy(update={name: getattr(given, name) for name in CONVERTING})
