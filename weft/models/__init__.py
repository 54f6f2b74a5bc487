"""Models written for one device, whose parameters name their dimensions; see :mod:`weft.models.transformer`."""
