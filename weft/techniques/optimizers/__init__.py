"""Update rules (:class:`weft.train.rules.update_rule.UpdateRule`), which ``optimizer.kind`` names."""
