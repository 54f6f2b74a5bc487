"""Examples, as a package that no other of this name can hide: some distributions bring an ``examples`` of their own."""
