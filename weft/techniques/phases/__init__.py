"""Techniques that fill phases of a training step (:class:`weft.train.step_technique.StepTechnique`)."""
