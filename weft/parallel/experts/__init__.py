"""Experts that are spread over ranks: the paths of tokens to experts, and the owners of experts."""
