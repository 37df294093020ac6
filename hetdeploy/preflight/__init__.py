"""Is this machine ready? Named checks, each with its fix; all of them run, then are reported together."""
