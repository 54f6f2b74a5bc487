"""The proofs that a layout computes what one device does, the fuzzer of layouts, and the pool of ranks for both."""
