"""Update rules (:class:`weft.train.rules.rank_sums.UpdateRule`), which ``optimizer.kind`` names."""
