"""Storage of AdamW's moments between updates (:class:`weft.train.rules.compact_adamw.Encoding`)."""
