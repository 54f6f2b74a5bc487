"""Experts that are spread over ranks: how tokens get to them, and who has which."""
