"""Scheduling policies, which decide what requests a step of the serving engine computes, one file each."""
