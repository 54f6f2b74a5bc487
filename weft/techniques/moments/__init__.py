"""How AdamW's moments rest between updates (:class:`weft.train.rules.small.Encoding`): ``optimizer.state`` names it."""
