"""The techniques that a recipe can name, each in a file of its own, which :mod:`weft.registry` imports by name.

No other file imports a file of this folder. A file works without the other files of its folder; if a file is deleted,
Weft lacks this technique and nothing else.
"""
