"""A model in numbers, without PyTorch: its parameters, foreign configurations, flops and bytes."""
