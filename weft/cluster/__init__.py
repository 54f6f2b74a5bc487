"""Several engines that act as one: a router dispatches requests to engines in other processes and on other hosts."""
