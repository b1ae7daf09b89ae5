"""Every verb of the service, independent of the protocol that carries it."""
