"""Dispatch policies of a cluster, one file each."""
