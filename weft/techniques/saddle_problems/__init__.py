"""Saddle problems (:class:`weft.saddle.saddle_problem.SaddleProblem`); ``saddle.problem`` names them."""
