"""This machine's network: which NIC to use, who listens where, why a connection failed."""
