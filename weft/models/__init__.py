"""Single-device models that name their dimensions; see :mod:`weft.models.transformer`."""
