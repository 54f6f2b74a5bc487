"""Losses of pairs of answers (:class:`weft.models.pair_loss.PairLoss`), which ``loss.kind`` names."""
