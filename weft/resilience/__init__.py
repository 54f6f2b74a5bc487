"""A run that goes on when ranks are lost: its members, the copies that they hold of each other, and tests of this."""
