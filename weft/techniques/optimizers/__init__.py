"""Update rules (:class:`weft.train.rules.rule.UpdateRule`), which ``optimizer.kind`` names."""
