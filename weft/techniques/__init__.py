"""The leaves: every technique that a recipe can name, in a file of its own, which :mod:`weft.registry` imports by name.

Nothing else imports a file of this folder. A file without its folder's neighbours works; a deleted file is a technique
that Weft does not have.
"""
