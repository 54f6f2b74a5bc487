"""How good an engine is: its times under a stream of requests, and its scores in tasks of lm-eval."""
