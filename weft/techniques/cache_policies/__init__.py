"""Cache policies, which choose the tokens that later tokens attend to, one folder each."""
