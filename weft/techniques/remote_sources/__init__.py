"""Places outside this machine from which sources are read, by the scheme of their address."""
