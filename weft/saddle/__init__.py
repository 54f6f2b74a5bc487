"""Saddle points over ranks: devices with a part of the objective each, and what they tell a server."""
