"""Buffers of samples between simulators and a training: which sample is drawn, and which one leaves for a new one."""
